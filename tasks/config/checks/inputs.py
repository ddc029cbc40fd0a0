"""The user's own files: the audit of a base, and the first rows as `prepare_data` reads them."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tasks.audit.run import audit
from tasks.config.checks import Context
from tasks.config.checks.memory import training_settings
from tasks.core.errors import DataError, EmptySplitError, Finding
from tasks.data.readers import FILE_KINDS, existing_file
from tasks.delivery.source import base_errors
from tasks.prepare import data_settings, prepare_data, source_identity
from tasks.weights.files.folder import CHAT_TEMPLATE

PEEK = 1000
"""Rows that are read: enough to see all columns of a source with mixed rows."""
TEMPLATE = 64
"""Tokens that a plain chat template adds to a prompt, about."""
_SILENT = logging.getLogger(f"{__name__}.silent")
_SILENT.disabled = True  # the stage itself logs what it leaves out


def problems(context: Context) -> Iterator[Finding]:
    """Yield the errors of a base in a local folder, and of local files of rows."""
    model, data = context.settings["model"], context.settings["data"]
    folder = Path(model["path"] or "").expanduser()
    if model["path"] and context.known.config and folder.is_dir():
        yield from _base(folder, str(source_identity(**model)))
    missing = list(_missing(data)) if data["kind"] != "toy" else []
    yield from missing
    kinds = {source["kind"] or data["kind"] for source in data["sources"]} or {data["kind"]}
    if missing or not kinds <= set(FILE_KINDS):
        return
    yield from _rows(context, folder)


def _rows(context: Context, base: Path) -> Iterator[Finding]:
    """Yield the problem of the first rows, and a warning for labels without their opposite."""
    arguments, objective = data_settings(context.settings), context.objective
    first = {**arguments, "max_samples": min(PEEK, arguments["max_samples"] or PEEK)}
    with tempfile.TemporaryDirectory() as out:
        try:
            try:
                prepare_data(Path(out), log=_SILENT, **first)
            except EmptySplitError:  # the first rows may all be equal
                prepare_data(Path(out), log=_SILENT, **arguments)
        except DataError as error:
            more = (detail for detail in error.details if detail not in error.message)
            allowed = next(more, "rows that the objective can read")
            yield Finding("data", error.message, allowed, error.hint or "data.path=<file>")
            return
        if objective == "kto":
            rows = (Path(out) / "train.jsonl").read_text("ascii").splitlines()
            labels = {json.loads(row)["desirable"] for row in rows}
            if len(labels) == 1:
                value = f"{str(*labels).lower()} in all of the first {len(rows)} training rows"
                reason = "kto learns from the difference between desirable and undesirable answers"
                override = "data.path=<file with rows of both labels>"
                yield Finding("data.label_key", value, reason, override, "warning")
        if context.settings["model"]["path"] and (base / "tokenizer_config.json").is_file():
            yield from _too_long(context, base, Path(out))


def _too_long(context: Context, base: Path, data: Path) -> Iterator[Finding]:
    """Yield the problem of rows that keep no label, if even the shortest may be too long.

    They are tokenised in a child process, since a tokenizer comes with torch.
    """
    from tasks.evaluation.scoring import ReferenceScorer
    from tasks.train import check_rows

    train = context.settings["train"]
    key, limit = "train.max_len", train["max_len"]
    if train["on_overlong"] == "refuse":
        read = sum(path.read_bytes().count(b"\n") for path in data.glob("*.jsonl"))
        if read >= PEEK:  # those after the first may fit
            return
    if context.online:
        key, limit = "rollout.max_prompt_len", context.settings["rollout"]["max_prompt_len"]
    with (data / "train.jsonl").open("rb") as rows:
        if min(_prompt_bytes(json.loads(row)) for row in rows) + TEMPLATE < limit:
            return
    template, training = data / CHAT_TEMPLATE, training_settings(context.settings)
    used = template if template.is_file() else None
    try:
        with ReferenceScorer(log=_SILENT, log_path=data / "tokens.log") as scorer:
            scorer.perform(check_rows, training, base, data, used, 1.0, ("train",))
    except DataError as error:
        allowed = f"rows that training can read with {key}={limit}"
        yield Finding("data", error.message, allowed, error.hint)


def _prompt_bytes(row: Mapping[str, Any]) -> int:
    """Return the bytes of what a row's users, system and tools say: at least one for each token."""
    messages = row.get("prompt") or row.get("messages") or ()
    texts = [str(each["content"]) for each in messages if each["role"] != "assistant"]
    return len("".join([*texts, str(row.get("tools") or "")]).encode())


def _missing(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield every data file that does not exist, with the name of a similar one."""
    needed = "name" if data["kind"] == "hub" else "path"
    if not (data[needed] or data["sources"]):
        yield Finding(f"data.{needed}", "nothing", "has to be set", f"data.{needed}=<{needed}>")
    files = {f"data.{key}": data[key] for key in ("eval_path", "chat_template")}
    sources = {f"data.sources[{n}].path": each for n, each in enumerate(data["sources"])}
    for key, source in (sources or {"data.path": {**data, "kind": None}}).items():
        if (source["kind"] or data["kind"]) in FILE_KINDS:
            files[key] = source["path"]
    for key, path in files.items():
        try:
            if path:
                existing_file(path, key=key)
        except DataError as error:
            value = error.message.removeprefix(f"{key}=")
            yield Finding(key, value, "a readable file", error.hint)


@cache  # the steps of a chain begin with the same base
def _base(folder: Path, _: str) -> list[Finding]:
    report = base_errors(audit(folder))
    texts = ((f"{error.code} {error.where}: {error.found}", error.why) for error in report.findings)
    return [Finding("model.path", *text, report.typed) for text in texts]
