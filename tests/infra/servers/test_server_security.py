"""The servers of `make up` as a web page, another user, and a user of the deployments meet them."""

from __future__ import annotations

import http.client
import json
import stat
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from flows.servers.services import Api, client_settings
from tests.infra.servers.site import Site

pytestmark = pytest.mark.slow
EVIL = "http://evil.example"


def status(port: int, method: str, path: str, body: Any = None, **headers: str) -> int:
    """Send a request with these headers, as a browser would. Returns the HTTP status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, sent)
        return connection.getresponse().status
    finally:
        connection.close()


def basic_auth(auth: str) -> str:
    return f"Basic {b64encode(auth.encode()).decode()}"


def own_page(site: Site) -> dict[str, str]:
    """Return the headers of a request from the server's own page after its login."""
    origin = f"http://127.0.0.1:{site.services.prefect_port}"
    return {"Origin": origin, "Authorization": basic_auth(site.services.auth)}


def test_only_the_owner_can_read_the_login(site: Site) -> None:
    path = site.services.home / "prefect.env"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    settings = client_settings(site.services.home)
    assert settings["PREFECT_API_URL"] == site.services.prefect.url
    assert len(settings["PREFECT_API_AUTH_STRING"]) > 40
    commands = Path("/proc").glob("[0-9]*/cmdline")
    text = b"".join(read_if_there(path) for path in commands)
    assert settings["PREFECT_API_AUTH_STRING"].encode() not in text


def read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_prefect_wants_the_login(site: Site) -> None:
    port = site.services.prefect_port
    path = f"/api/deployments/{site.deployment('rlhf-qlora')['id']}/create_flow_run"
    assert status(port, "POST", path, {}) in (401, 403)
    assert status(port, "GET", "/api/csrf-token?client=x") == 401
    assert status(port, "GET", "/api/admin/version", Authorization=basic_auth("a:b")) == 401
    assert status(port, "GET", "/api/admin/version", **own_page(site)) == 200
    page = Api(site.services.prefect.url.removesuffix("/api")).get("/ui-settings")
    assert (page["auth"], page["csrf_enabled"]) == ("BASIC", True)  # so it asks for the login


def test_a_page_of_another_site_cannot_use_prefect(site: Site) -> None:
    """It has neither login nor CSRF token, and its browser shows it no answer."""
    port = site.services.prefect_port
    path = f"/api/deployments/{site.deployment('rlhf-qlora')['id']}/create_flow_run"
    foreign = own_page(site) | {"Origin": EVIL}
    assert status(port, "POST", path, {}, **foreign) == 403, "no token"
    assert status(port, "OPTIONS", path, Access_Control_Request_Method="POST", Origin=EVIL) == 400
    assert status(port, "GET", "/api/admin/version", Origin=EVIL) == 401, "no login"


def test_other_users_can_read_nothing(site: Site) -> None:
    runs = site.services.runs
    folders = [runs / name for name in ("prefect", "mlflow", "logs", "reports", "services")]
    paths = [p for folder in folders for p in folder.rglob("*") if not p.is_symlink()]
    assert {"mlflow.db", "worker.log"} <= {path.name for path in paths}
    assert [path for path in paths if path.stat().st_mode & 0o077] == []
