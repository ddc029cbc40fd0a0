"""Create, update or remove the alarm of infra/servers/automations.yaml on a Prefect server.

    python -m infra.servers.automations    server: PREFECT_API_URL, PREFECT_API_AUTH_STRING

`make deploy` calls it for the server of `make up`. PLUMBLINE_WEBHOOK_URL says where alarms go;
`off` removes the alarm, and without the variable it stays as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from flows.servers.api import Api
from flows.servers.services import AUTH, URL
from tasks.core.errors import ConfigError, PlumblineError

WEBHOOK, OFF = "PLUMBLINE_WEBHOOK_URL", "off"
FILE = Path(__file__).with_name("automations.yaml")
HEADERS = {"Content-Type": "application/json"}


def apply(prefect: Api) -> str:
    """Make the alarm of a server as the environment wants it. A paused alarm stays paused.

    Returns:
        One line about the alarm, without its URL, which may have a secret in it.

    Raises:
        ConfigError: the URL is not one of HTTP.
        PlumblineError: the server refused.
    """
    document: dict[str, Any] = yaml.safe_load(FILE.read_text())
    name = document["name"]
    query = {"automations": {"name": {"any_": [name]}}}
    known = prefect.post("/automations/filter", query)
    url = os.environ.get(WEBHOOK, "")
    if url == OFF:
        _remove(prefect, name, known)
        known = []
    elif url:
        _require_http(url)
        payload = document.pop("payload")
        action = {"type": "call-webhook", "block_document_id": _block(prefect, name, url)}
        document["actions"] = [action | {"payload": payload}]
        document["enabled"] = all(each["enabled"] for each in known)
        if known:
            prefect.call("PUT", f"/automations/{known[0]['id']}", document)
        else:
            known = [prefect.post("/automations/", document)]
    if not known:
        return f"alarm    off: {WEBHOOK}=<URL> make deploy"
    paused = "" if known[0]["enabled"] else ", paused"
    return f"alarm    {name}: a webhook for failed and crashed runs{paused}"


def _require_http(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{WEBHOOK} is no URL of HTTP", hint=f"{WEBHOOK}=https://<host>/<path>, or {OFF}"
        )


def _block(prefect: Api, name: str, url: str) -> str:
    """Write the URL to the server's block of this name. Returns the id of the block."""
    data = {"url": url, "headers": HEADERS}
    path = f"/block_types/slug/webhook/block_documents/name/{name}"
    if (block := prefect.get(path)) is not None:
        prefect.call("PATCH", f"/block_documents/{block['id']}", {"data": data})
        return str(block["id"])
    block_type = prefect.get("/block_types/slug/webhook")["id"]
    query = {"block_schemas": {"block_type_id": {"any_": [block_type]}}}
    newest = prefect.post("/block_schemas/filter", query)[0]["id"]
    ids = {"block_type_id": block_type, "block_schema_id": newest}
    return str(prefect.post("/block_documents/", {"name": name, "data": data, **ids})["id"])


def _remove(prefect: Api, name: str, known: list[dict[str, Any]]) -> None:
    """Remove the automation and the block with its URL."""
    for automation in known:
        prefect.call("DELETE", f"/automations/{automation['id']}")
    path = f"/block_types/slug/webhook/block_documents/name/{name}"
    if (block := prefect.get(path)) is not None:
        prefect.call("DELETE", f"/block_documents/{block['id']}")


def main() -> int:
    """Apply the alarm to the server of the environment. Returns the exit status."""
    try:
        print(apply(Api(os.environ[URL], os.environ.get(AUTH, ""))))
    except KeyError:
        print(f"{URL} is not set; make deploy uses the server of make up", file=sys.stderr)
        return ConfigError.exit_code
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
