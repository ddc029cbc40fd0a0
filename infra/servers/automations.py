"""Make or remove the alarm of infra/servers/automations.yaml on a Prefect server.

    python -m infra.servers.automations    server: PREFECT_API_URL, PREFECT_API_AUTH_STRING

`make deploy` calls it for the server of `make up`. PLUMBLINE_WEBHOOK_URL says where alarms go;
`off` removes the alarm, and without the variable it stays as it is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import yaml

WEBHOOK, OFF = "PLUMBLINE_WEBHOOK_URL", "off"
FILE = Path(__file__).with_name("automations.yaml")


def main() -> None:
    """Make the alarm as the environment wants it, and print one line about it."""
    from prefect.automations import Automation
    from prefect.blocks.webhook import Webhook

    url = os.environ.get(WEBHOOK)
    if not url:
        print(f"alarm    as before; {WEBHOOK}=<URL> make deploy sets it, {OFF} removes it")
        return
    document = yaml.safe_load(FILE.read_text())
    name, payload = document["name"], document.pop("payload")
    with suppress(ValueError):  # there is none
        Automation.read(name=name).delete()
    if url == OFF:
        with suppress(ValueError):
            Webhook.delete(name)
        print("alarm    off")
        return
    block = Webhook(url=url, headers={"Content-Type": "application/json"})
    action = {"type": "call-webhook", "block_document_id": str(block.save(name, overwrite=True))}
    Automation(**document, actions=[action | {"payload": payload}]).create()
    print(f"alarm    {name}: a webhook for failed and crashed runs")


if __name__ == "__main__":
    main()
