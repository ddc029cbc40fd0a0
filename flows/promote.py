"""Let the alias `champion` name a registered version, or roll back to an earlier one.

    python flows/promote.py models:/plumbline/3                  by number
    python flows/promote.py models:/plumbline@candidate          the model that was trained last

Every byte of the served folder is compared with what was registered before the alias moves. Exit
status: 0 done, 1 the folder is not what was registered, 2 no such version or MLflow does not
answer; the alias stays unless the status is 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "promote")

from flows.cli.composed import Composed
from flows.cli.registry import named, registry
from tasks.core.errors import ConfigError
from tasks.core.terminal import command, plain
from tasks.pipeline.artifact import require_published
from tasks.tracking.mlflow_server import CHAMPION


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    folder, version = named(composed)
    if version is None:
        raise ConfigError(
            f"{folder} is a folder; registered versions are promoted",
            hint=f"{command('promote')} models:/<model>/<number>",
        )
    artifact = require_published(folder, version.digest)
    with registry(composed) as server:
        before = server.promote(version)
    instead = f" instead of models:/{version.model}/{before}" if before else ""
    print(plain(f"models:/{version.name} @{CHAMPION}{instead}"))
    print(plain(f"served model: {folder}\ndigest verified: {artifact.digest}"))
    if version.gate not in ("", "passed"):
        print(plain(f"warning: it has not passed its gate: {version.gate}"))
    return 0
