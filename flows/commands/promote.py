"""Run `python flows/promote.py models:/NAME/NUMBER`, without Prefect and torch."""

from __future__ import annotations

from flows.cli.config import Composed
from flows.cli.entry import exit_on_signals, run_main
from flows.commands.registry import named, registry, verified
from tasks.core.errors import ConfigError
from tasks.core.terminal import plain
from tasks.tracking.mlflow_registry import CHAMPION


def main() -> int:
    """Run the command of this process. Returns the exit status."""
    with exit_on_signals():
        return run_main("promote", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    folder, version = named(composed)
    if version is None:
        raise ConfigError(
            f"{folder} is a folder; registered versions are promoted",
            hint="python flows/promote.py models:/<model>/<number>",
        )
    artifact = verified(composed, folder, version)
    with registry(composed) as server:
        before = server.promote(version)
    instead = f" instead of models:/{version.model}/{before}" if before else ""
    print(plain(f"models:/{version.name} @{CHAMPION}{instead}"))
    print(plain(f"served model: {folder}\ndigest verified: {artifact.digest}"))
    if version.gate not in ("", "passed"):
        print(plain(f"warning: it has not passed its gate: {version.gate}"))
    return 0
