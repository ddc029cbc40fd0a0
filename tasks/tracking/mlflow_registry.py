"""Versions in MLflow's model registry, through a client of `mlflow_server`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tasks.pipeline.report import Registered, RegisteredModel

CHAMPION = "champion"
"""Alias of the version that is in use."""
NUMBERS = "numbers"
"""Tag with the numbers of the gate, as JSON."""
EVALUATED_ON = "digest.heldout"
"""Tag with the hash of the evaluation rows."""
GATE = "gate"
"""Tag with the verdict of the gate: `passed`, or the reason of its failure."""
TRAINED_AT = "trained_at"
"""Tag of a model version with the end of its training, which decides about `candidate`."""


@dataclass(frozen=True)
class Version:
    """A registered model version.

    `path` of the served folder, and `digest` of its manifest, are empty if another program has
    registered the version.
    """

    model: str
    number: int
    aliases: tuple[str, ...]
    path: str
    digest: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Model and number, e.g. `plumbline/3`."""
        return f"{self.model}/{self.number}"

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the gate that its run measured."""
        with suppress(ValueError):
            return dict(json.loads(self.tags.get(NUMBERS, "{}")))
        return {}

    @property
    def rows(self) -> str:
        """Hash of the evaluation rows of its run; empty if unknown."""
        return self.tags.get(EVALUATED_ON, "")

    @property
    def gate(self) -> str:
        """Verdict of the gate: `passed`, or the reason of its failure; empty if unknown."""
        return self.tags.get(GATE, "")


def register_version(
    client: Any,
    model: RegisteredModel,
    write: Callable[[dict[str, str]], int],
    *,
    promote: bool = False,
) -> Registered:
    """Register the served folder, and let `candidate` name the version trained last.

    A version with the same path and digest is reused: a configuration that is run again from the
    cache registers nothing.
    """
    name = model.name
    wanted = {"path": str(model.served.path), "digest": model.served.digest}
    if not client.search_registered_models(f"name='{name}'"):
        client.create_registered_model(name)
    versions = client.search_model_versions(f"name='{name}'")
    known = [version for version in versions if wanted.items() <= version.tags.items()]
    trained = {int(version.version): _trained_at(version) for version in versions}
    at = model.trained_at
    if known:
        number, recorded = int(known[0].version), known[0].tags.get(TRAINED_AT, "")
        at = max(at, recorded)  # later if the same bytes were trained again
        if at != recorded:
            client.set_model_version_tag(name, str(number), TRAINED_AT, at)
        for tag in (NUMBERS, EVALUATED_ON, GATE):  # the evaluation may be another one
            if tag in model.tags:
                client.set_model_version_tag(name, str(number), tag, model.tags[tag])
    else:
        number = write({**model.tags, **wanted, TRAINED_AT: at})
    trained[number] = _milliseconds(at)
    newest = max(trained, key=lambda each: (trained[each], each))
    client.set_registered_model_alias(name, "candidate", str(newest))
    version = f"models:/{name}/{number}"
    if promote:
        client.set_registered_model_alias(name, CHAMPION, str(number))
    return Registered(version, f"models:/{name}/{newest}", version if promote else "")


def _trained_at(version: Any) -> float:
    """Return the end of a version's training; earlier releases registered right after it."""
    recorded = version.tags.get(TRAINED_AT)
    return _milliseconds(recorded) if recorded else float(version.creation_timestamp)


def _milliseconds(time: str) -> float:
    return 1000 * datetime.fromisoformat(time).timestamp()


def list_versions(client: Any) -> list[Version]:
    """Return the versions of all registered models, the newest of a model first."""
    listed, token = [], None
    while True:
        page = client.search_model_versions(page_token=token)
        listed += page
        token = page.token
        if not token:
            break
    # Not `version.aliases`: a search leaves them out.
    aliases = {model: _aliases(client, model) for model in {v.name for v in listed}}
    listed.sort(key=lambda version: (version.name, -int(version.version)))
    return [
        Version(
            version.name,
            int(version.version),
            aliases[version.name].get(str(version.version), ()),
            version.tags.get("path", ""),
            version.tags.get("digest", ""),
            dict(version.tags),
        )
        for version in listed
    ]


def _aliases(client: Any, model: str) -> dict[str, tuple[str, ...]]:
    """Return the aliases of a model's versions, by version number."""
    by_version: dict[str, tuple[str, ...]] = {}
    for alias, version in sorted(client.get_registered_model(model).aliases.items()):
        by_version[str(version)] = (*by_version.get(str(version), ()), alias)
    return by_version
