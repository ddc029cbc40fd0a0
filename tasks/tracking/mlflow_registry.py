"""Versions in MLflow's model registry, through a client of `mlflow_server`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
"""Tag with the end of the training in UTC, ISO 8601, which decides about `candidate`."""


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
    name, at = model.name, model.trained_at
    wanted = {"path": str(model.served.path), "digest": model.served.digest}
    if not client.search_registered_models(f"name='{name}'"):
        client.create_registered_model(name)
    versions = client.search_model_versions(f"name='{name}'")
    trained = {int(version.version): version.tags.get(TRAINED_AT, "") for version in versions}
    known = [version for version in versions if wanted.items() <= version.tags.items()]
    if known:
        number = int(known[0].version)
        at = max(at, trained[number])  # later if the same bytes were trained again
        # The evaluation may be another one.
        tags = {tag: model.tags[tag] for tag in (NUMBERS, EVALUATED_ON, GATE) if tag in model.tags}
        for tag, value in {**tags, TRAINED_AT: at}.items():
            client.set_model_version_tag(name, str(number), tag, value)
    else:
        number = write({**model.tags, **wanted, TRAINED_AT: at})
    trained[number] = at
    newest = max(trained, key=lambda each: (trained[each], each))
    client.set_registered_model_alias(name, "candidate", str(newest))
    version = f"models:/{name}/{number}"
    if promote:
        client.set_registered_model_alias(name, CHAMPION, str(number))
    return Registered(version, f"models:/{name}/{newest}", version if promote else "")


def list_versions(client: Any) -> list[Version]:
    """Return the versions of all registered models, the newest of a model first."""
    listed, token = [], None
    while True:
        page = client.search_model_versions(page_token=token)
        listed += page
        token = page.token
        if not token:
            break
    aliases: dict[str, dict[str, list[str]]] = {}  # a search leaves them out
    for model in {version.name for version in listed}:
        aliases[model] = {}
        for alias, number in sorted(client.get_registered_model(model).aliases.items()):
            aliases[model].setdefault(str(number), []).append(alias)
    listed.sort(key=lambda version: (version.name, -int(version.version)))
    return [
        Version(
            version.name,
            int(version.version),
            tuple(aliases[version.name].get(str(version.version), ())),
            version.tags.get("path", ""),
            version.tags.get("digest", ""),
            dict(version.tags),
        )
        for version in listed
    ]
