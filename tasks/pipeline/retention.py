"""Decide what a folder of runs still needs, and remove the rest (`flows/prune.py`).

Removed are artifacts, checkpoints and logs of runs that were last used before a point in time.
Kept, whatever their age, are:

* every registered model, and all artifacts that it was made from or measured by;
* the checkpoints of an unfinished training, and what it reads;
* what a run that failed or was killed has used, for three days;
* everything that a kept artifact was made from.

Not touched: the databases and files of MLflow and Prefect, reports of runs, logs of servers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from tasks.core.errors import ArtifactError
from tasks.core.redaction import redact
from tasks.pipeline.artifact import read_manifest
from tasks.pipeline.locks import abandoned
from tasks.weights.files.documents import MANIFEST

REGISTERED, RECENT, RESUMABLE = "registered", "recent", "resumable"
UNREADABLE = "manifest unreadable"
DAY_S = 86400.0
KEPT_S = 3 * DAY_S
"""Seconds for which an interrupted run may go on."""
_RUN = re.compile(r"(\d{8}-\d{6})-\w+")
_NAMED = re.compile(r"\bartifacts/([a-z_]+/[0-9a-f]{20})\b")
_PLACES = ("artifacts/*", "checkpoints", "logs")
"""Folders, relative to that of the runs, whose entries are removed."""


@dataclass(frozen=True)
class Stored:
    """A published artifact: its folder, kind, digest, digests of its inputs by role, last use."""

    path: Path
    kind: str
    digest: str
    inputs: Mapping[str, str]
    used: float


@dataclass(frozen=True)
class Item:
    """A folder to remove: its sort, such as "served" or "checkpoints", its last use, its bytes.

    A file with several links counts in the first item that has it.
    """

    what: str
    path: Path
    used: float
    freed: int


@dataclass(frozen=True)
class Plan:
    """Folders to remove, and why the artifacts that stay do."""

    items: tuple[Item, ...]  # what was made from others comes first
    kept: Mapping[Path, str]  # reason by artifact: registered, resumable, recent, unreadable
    checkpoints: tuple[Path, ...]  # of unfinished trainings, which stay


def plan(
    runs: Path,
    registered: Sequence[tuple[str, str]],
    tracking_uri: str,
    *,
    now: float,
    keep: int | None = None,
    days: float | None = None,
    unfinished: bool = False,
) -> Plan:
    """Decide what to remove, at the time `now` in seconds since the epoch. Writes nothing.

    `registered` has path and digest of every version that the MLflow at `tracking_uri` lists, empty
    if none was asked; models that runs have registered elsewhere are kept. `keep`, `days` and
    `unfinished` are the settings of the command. Raises ArtifactError if the manifest of a
    registered model cannot be read, so that nobody knows what it was made from.
    """
    starts = _starts(runs)
    newest = [0.0, *sorted(starts.values())][-keep:] if keep else [now]
    limit = min(now, newest[0], now - days * DAY_S if days is not None else now)
    stored, broken = _stored(runs / "artifacts")
    training, old = _checkpoints(runs, limit, unfinished)
    roots = dict.fromkeys(_registered(stored, broken, registered), REGISTERED)
    named = [(text, REGISTERED) for text in _registered_elsewhere(runs, tracking_uri)]
    named += [(_text(folder / "job.json"), RESUMABLE) for folder in training]
    for text, reason in named:
        for match in _NAMED.finditer(text):
            roots.setdefault(runs / "artifacts" / match[1], reason)
    resumable = limit if unfinished else min([limit, *_interrupted(runs, starts, now)])
    for each in stored:
        if each.used >= resumable:
            roots.setdefault(each.path, RECENT if each.used >= limit else RESUMABLE)
    kept = _needed(stored, roots) | dict.fromkeys(broken, UNREADABLE)
    gone = sorted((each for each in stored if each.path not in kept), key=lambda each: -each.used)
    left = abandoned(path for place in _PLACES for path in sorted(runs.glob(f"{place}/.*.tmp")))
    folders = [("interrupted", path, _mtime(path)) for path in left]
    folders += [("checkpoints", path, used) for path, used in old]
    folders += [(each.kind, each.path, each.used) for each in gone]
    folders += [
        ("logs", path, start)
        for name, start in sorted(starts.items())
        if start < limit and (path := runs / "logs" / name).is_dir()
    ]
    counted: set[int] = set()
    items = []
    for what, path, used in folders:
        sizes = {file.lstat().st_ino: file.lstat().st_size for file in path.rglob("*")}
        items.append(Item(what, path, used, sum(sizes[n] for n in sizes.keys() - counted)))
        counted |= sizes.keys()
    return Plan(tuple(items), kept, tuple(training))


def remove(planned: Plan) -> None:
    """Remove the folders of a plan, while no other process uses the folder of runs.

    Each is renamed first, so that a kill leaves no half artifact; the next prune removes the rest.
    Raises ArtifactError if a folder cannot be removed; the others are.
    """
    problems: list[str] = []
    for item in planned.items:
        hidden = item.path.with_name(f".{item.path.name.strip('.')}.{os.getpid()}.tmp")
        try:
            item.path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            problems.append(f"{item.path}: {error.strerror}")
    if problems:
        raise ArtifactError(f"cannot remove {problems[0]}", details=problems)


def _needed(stored: Sequence[Stored], roots: Mapping[Path, str]) -> dict[Path, str]:
    """Return the artifacts that must stay, with the reason of the root that needs them."""
    reasons: dict[Path, str] = {}
    for root, reason in roots.items():
        waiting = [each for each in stored if each.path == root]
        while waiting:
            each = waiting.pop()
            if each.path not in reasons:
                reasons[each.path] = reason
                made_from = set(each.inputs.values())
                waiting += [
                    other
                    for other in stored
                    if other.digest in made_from
                    or (other.kind == "report" and other.inputs.get("served") == each.digest)
                ]
    return reasons


def _stored(store: Path) -> tuple[list[Stored], list[Path]]:
    """Return the artifacts, and the folders whose manifest cannot be read."""
    stored, broken = [], []
    for path in sorted(store.glob("[!.]*/[!.]*")):
        try:
            document = read_manifest(path)
        except ArtifactError:
            broken.append(path)
            continue
        record = store / ".seen" / f"{document['digest']}.json"  # `intact` touches it
        used = max(_mtime(file) for file in (record, path / MANIFEST) if file.is_file())
        stored.append(Stored(path, document["kind"], document["digest"], document["inputs"], used))
    return stored, broken


def _registered(
    stored: Sequence[Stored], broken: Sequence[Path], registered: Sequence[tuple[str, str]]
) -> list[Path]:
    """Return the artifacts of registered versions, by path or digest: a folder may have moved."""
    paths = {Path(path).resolve() for path, _ in registered if path}
    digests = {digest for _, digest in registered if digest}
    if unclear := [path for path in broken if path.resolve() in paths]:
        raise ArtifactError(
            f"{unclear[0]}: a registered model, and its manifest cannot be read",
            hint="restore the folder, or delete the version in MLflow",
        )
    return [e.path for e in stored if e.path.resolve() in paths or e.digest in digests]


def _registered_elsewhere(runs: Path, uri: str) -> Iterator[str]:
    """Yield the summaries of runs that registered a model with another MLflow server."""
    default = f"sqlite:///{runs / 'mlflow' / 'mlflow.db'}"
    for folder in sorted((runs / "reports").glob("[!.]*")):
        summary = _text(folder / "summary.json")
        try:
            if not (json.loads(summary or "{}").get("gate") or {}).get("version"):
                continue
            recorded = yaml.safe_load(_text(folder / "config.yaml"))["tracking"]["uri"] or default
        except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
            recorded = ""  # damaged: its model may be registered anywhere
        if recorded != redact(uri):
            yield summary


def _starts(runs: Path) -> dict[str, float]:
    """Return the start of every run that has left logs or a report, by its name."""
    names = {path.name for place in ("logs", "reports") for path in (runs / place).glob("[!.]*")}
    return {
        name: datetime.strptime(match[1], "%Y%m%d-%H%M%S").timestamp()
        for name in names
        if (match := _RUN.fullmatch(name))
    }


def _interrupted(runs: Path, starts: Mapping[str, float], now: float) -> Iterator[float]:
    """Yield the starts of recent runs that did not complete: the same command goes on with them."""
    for name, start in starts.items():
        if start >= now - KEPT_S:
            text = _text(runs / "reports" / name / "summary.json")
            if '"status": "completed"' not in text:
                yield start


def _checkpoints(
    runs: Path, limit: float, unfinished: bool
) -> tuple[list[Path], list[tuple[Path, float]]]:
    """Return the folders that an unfinished training needs, and the old ones of the others."""
    training, old = [], []
    for folder in sorted((runs / "checkpoints").glob("[!.]*")):
        used = max(_mtime(path) for path in (folder, *folder.iterdir()))
        finished = (runs / "artifacts" / "shards" / folder.name / MANIFEST).is_file()
        resumable = not finished and any(folder.glob("step-????????"))
        if resumable and (used >= limit or not unfinished):
            training.append(folder)
        elif used < limit:
            old.append((folder, used))
    return training, old


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _mtime(path: Path) -> float:
    return path.lstat().st_mtime
