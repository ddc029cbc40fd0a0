"""Run `python flows/promote.py models:/NAME/NUMBER`, without Prefect and torch."""

from __future__ import annotations

from flows.cli.composed import Composed
from flows.commands.registry import named, registry, verified
from tasks.core.errors import ConfigError
from tasks.core.terminal import plain
from tasks.tracking.mlflow_registry import CHAMPION


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
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
