"""Find the model that a command names.

models:/plumbline/3           a registered version
models:/plumbline@champion    the version that an alias names
/served/plumbline             a served folder
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.output import folder, no_folder
from tasks.config.checks.servers import reachable
from tasks.core.errors import ConfigError, preflight
from tasks.core.redaction import redact
from tasks.tracking.mlflow_server import Server, Version
from tasks.tracking.outbox import RefusedError, UnreachableError

SCHEME = "models:/"
DATABASE = "mlflow/mlflow.db"


@contextmanager
def registry(composed: Composed) -> Iterator[Server]:
    """Open MLflow's registry. Raises ConfigError if there is none, or it does not answer."""
    bootstrap(composed.runs)
    uri = composed.settings["tracking"]["uri"]
    preflight(list(reachable(uri)))
    if uri is None and not (composed.runs / DATABASE).is_file():
        raise ConfigError(
            f"paths.runs={composed.runs}: no model is registered there: no {DATABASE}",
            hint="paths.runs=<folder of runs>, or tracking.uri=<MLflow's URI>",
        )
    try:
        yield Server(composed.tracking_uri, composed.tracking_root)
    except (UnreachableError, RefusedError) as error:
        raise ConfigError(
            f"the registry of MLflow at {redact(composed.tracking_uri)} cannot be used: {error}",
            hint="start that server, or name another one: tracking.uri=<URI>",
        ) from None


def find(versions: Sequence[Version], name: str) -> Version:
    """Return the registered version that a name means. Raises ConfigError if there is none."""
    known = {f"{SCHEME}{v.model}@{alias}": v for v in versions for alias in v.aliases}
    known |= {f"{SCHEME}{version.name}": version for version in versions}
    if name in known:
        return known[name]
    offered = [key for key, version in known.items() if version.path]  # others are not ours
    near = difflib.get_close_matches(name, offered, n=3, cutoff=0.6) or offered[:3]
    raise ConfigError(f"{name} is not registered", hint=" or ".join(near) or "train a model first")


def named(composed: Composed) -> tuple[Path, Version | None]:
    """Return the folder that setting `source` names, and its version if it is registered.

    Raises ConfigError if there is no such version or folder.
    """
    name = composed.settings["source"]
    if name.startswith(SCHEME):
        with registry(composed) as server:
            version = find(server.versions(), name)
        return Path(version.path), version
    preflight(list(no_folder("source", name)))
    return folder(name), None
