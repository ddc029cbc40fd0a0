"""The data files and their first rows. `prepare` reports problems in the rows below."""

from __future__ import annotations

import difflib
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.core.finding import Finding
from tasks.core.terminal import typed
from tasks.data.columns import Columns
from tasks.data.control import ESCAPE, KEEP, REFUSE, Control
from tasks.data.kinds import KINDS, PROMPTS, TEXTS, Kind, kind_for
from tasks.data.messages import Unusable
from tasks.data.readers import FILE_KINDS, Row, existing_file, read_rows
from tasks.data.sources import wrong_probabilities
from tasks.prepare import control_settings

TEXT = "text"
"""Usual name of a column of raw texts."""
PEEK = 1000
"""Rows that are read: enough to see all columns of a source with mixed rows."""
USUAL = {
    "messages": ("conversation", "dialog", "chat"),
    "prompt": ("instruction", "question", "query", "problem", "input"),
    "response": ("output", "completion", "answer", "target", "solution"),
    "chosen": ("chosen_response", "preferred", "winner"),
    "rejected": ("rejected_response", "dispreferred", "loser"),
    "label": ("kto_tag", "desirable"),
}
"""Names of columns in other tools, by our name."""


def control_of(settings: Mapping[str, Any]) -> Control:
    """Return the control tokens of the model, and what becomes of rows that hold them."""
    tokens = control_settings(settings)
    mode = settings["data"]["control_tokens"]
    return Control(tokens["model_tokens"], mode, tokens["last_answer"]) if tokens else Control()


def readable(
    settings: Mapping[str, Any], objective: str = "sft", control: Control | None = None
) -> list[Finding]:
    """Check that sources are named and readable, and that their first rows fit the objective.

    Args:
        settings: section `data`.
        objective: `train.objective`.
        control: result of `control_of`; None looks for no control tokens.
    """
    kind, control = settings["kind"], control or Control()
    findings = _template(settings["chat_template"])
    if kind == "toy":
        return findings + _not_read(settings)
    if settings["sources"]:
        return findings + _several(settings, objective, control)
    if kind == "hub":
        missing = Finding("data.name", "nothing", "has to be given", "data.name=owner/name")
        return findings if settings["name"] else [*findings, missing]
    if not settings["path"]:
        missing = Finding("data.path", "nothing", "has to be given", "data.path=<file>")
        return [*findings, missing]
    for key in ("path", "eval_path"):
        if settings[key]:
            findings += _file(f"data.{key}", settings[key], settings, objective, control)
    return findings


def _not_read(settings: Mapping[str, Any]) -> list[Finding]:
    """Refuse the user's data beside the embedded tasks."""
    named = [key for key in ("path", "eval_path", "name", "sources") if settings[key]]
    text, allowed = "set with data.kind=toy", "the embedded tasks would be read instead"
    override = "data=jsonl|csv|parquet|hub, without data=toy"
    return [Finding(f"data.{key}", text, allowed, override) for key in named]


def _several(settings: Mapping[str, Any], objective: str, control: Control) -> list[Finding]:
    sources, findings = settings["sources"], []
    if settings["path"] or settings["name"]:
        key = "data.path" if settings["path"] else "data.name"
        text = f"{key} and data.sources are both given"
        findings.append(Finding("data.sources", text, "one of them", f"{key}=null"))
    wrong = wrong_probabilities([source["probability"] for source in sources])
    if wrong:
        allowed = "positive, together 1; or none for any source"
        findings.append(Finding("data.sources", wrong, allowed, "probability: 0.7 and 0.3"))
    for number, source in enumerate(sources):
        what = f"data.sources[{number}].path"
        named = {k: v for k, v in source.items() if v is not None and k.endswith(("_key", "kind"))}
        merged = {**settings, **named}
        if merged["kind"] in FILE_KINDS:
            findings += _file(what, source["path"], merged, objective, control)
        elif merged["kind"] == "toy":
            findings.append(Finding(what, "kind toy", "a file or a hub id", "kind: jsonl"))
        if source["max_samples"] is not None and source["max_samples"] < 1:
            text = f"max_samples: {source['max_samples']}"
            findings.append(Finding(what, text, "1 or more", "max_samples: null"))
    if settings["eval_path"]:
        findings += _file("data.eval_path", settings["eval_path"], settings, objective, control)
    return findings


def _template(path: str | None) -> list[Finding]:
    if path is None:
        return []
    try:
        existing_file(path, key="data.chat_template")
    except DataError as error:
        return [_refused("data.chat_template", error)]
    return []


def _file(
    what: str, path: str, settings: Mapping[str, Any], objective: str, control: Control
) -> list[Finding]:
    """Check that a file can be read and has rows that the objective can learn from.

    Args:
        what: key of the file, for messages.
        path: of the file.
        settings: section `data`, or one of its sources.
        objective: `train.objective`.
        control: control tokens in the texts of rows.
    """
    try:
        existing_file(path, key=what)
        rows = list(itertools.islice(read_rows(settings["kind"], path), PEEK))
    except DataError as error:
        return [_refused(what, error)]
    if not rows:
        return [Finding(what, f"{path} has no rows", "a file with rows", f"{what}=<file>")]
    if settings["kind"] == "jsonl" and rows[0].problem and _is_list(path):
        wrong, right = f"{path} is one JSON list", Path(path).with_suffix(".json")
        allowed = f"such a file is named .json: {shlex.join(['mv', str(path), str(right)])}"
        return [Finding(what, wrong, allowed, typed(what, right))]
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    if not names:  # not one of them can be read
        wrong = f"{rows[0].place}: {rows[0].problem}"
        allowed, override = f"{settings['kind']} as data.kind says", "data=jsonl|csv|parquet"
        if rows[0].problem.startswith("not UTF-8"):
            allowed, override = "UTF-8", f"{what}=<the new file>"
        return [Finding(what, wrong, allowed, override)]
    columns = Columns.of({k: v for k, v in settings.items() if k.endswith("_key")}).among(names)
    kind = kind_for(objective, texts=columns.text is not None)
    problems = wrong_columns(names, columns, kind=kind, where=str(path))
    other = _other_kind(rows, columns, kind) if problems else None
    named_near = any("<column>" not in problem.override for problem in problems)
    if other is not None and not (other is TEXTS and named_near):
        return [_other_objective(rows, columns, objective, other, str(path))]
    problems = problems or _none_usable(rows, columns, kind, what)
    fail = settings["on_bad_line"] == "fail"
    return problems or _bad(rows, columns, kind, control, what, fail=fail)


def _bad(
    rows: Sequence[Row], columns: Columns, kind: Kind, control: Control, what: str, *, fail: bool
) -> list[Finding]:
    """Refuse rows that would end the run, unless they are skipped; report control tokens."""
    reasons: list[str] = []
    warnings: list[str] = []
    for row in rows:
        try:
            if row.problem:
                raise Unusable(row.problem)
            _, warning = control.apply(kind.read(row.values, columns.among(row.values)))
            warnings += [f"{row.place}: {warning}"] * bool(warning)
        except Unusable as reason:
            reasons.append(f"{row.place}: {reason}")
    first, findings = f"of the first {len(rows)} rows", []
    if reasons and fail:
        value = f"{len(reasons)} {first} cannot be used, first {reasons[0]}"
        override = "data.on_bad_line=skip, or rows without the mistake"
        findings.append(Finding(what, value, "all are needed", override))
    if warnings:
        value = f"{len(warnings)} {first} with control tokens, first {warnings[0]}"
        allowed, override = "it forges turns", f"data.control_tokens={ESCAPE}, {REFUSE} or {KEEP}"
        findings.append(Finding(what, value, allowed, override, "warning"))
    return findings


def _is_list(path: str) -> bool:
    file = Path(path).expanduser()
    if file.suffix == ".json":
        return False  # read as a list
    with file.open("rb") as content:
        return content.read(4096).lstrip()[:1] == b"["


def _refused(what: str, error: DataError) -> Finding:
    """Return an error of the readers as a finding."""
    message = error.message.removeprefix(f"{what}=")
    return Finding(what, message, "a readable file", error.hint or f"{what}=<file>")


def wrong_columns(
    names: Sequence[str], columns: Columns, *, kind: Kind, where: str
) -> list[Finding]:
    """Return a finding for every column that rows of a kind need and the file does not have.

    Args:
        names: columns of the file.
        columns: names that are set for the columns.
        kind: of the rows.
        where: the file, for messages.
    """
    missing = [_missing(roles, names, columns) for roles in kind.either]
    optional = _missing(_asked_for(kind.extras, columns), names, columns)
    if not all(missing):
        wanted = optional
    else:
        wanted = [*missing[-1], *optional]
        near = _near(columns.messages, names, 0.6) if "messages" in missing[0] else None
        if near and len(missing) > 1:  # the other way out: messages under another name
            wanted = missing[0]
    return [_column(role, columns, names, where) for role in wanted]


def _asked_for(extras: Sequence[str], columns: Columns) -> list[str]:
    """Return the optional columns that the user named; one with its usual name may be missing."""
    usual = Columns()
    return [
        role for role in extras
        if role not in ("prompt", "messages") and getattr(columns, role) != getattr(usual, role)
    ]  # fmt: skip


def _missing(roles: Sequence[str], names: Sequence[str], columns: Columns) -> list[str]:
    """Return the roles that have no column; `messages` without a name is missing too."""
    named = columns.named(roles)
    absent = [role for role, name in named.items() if name not in names]
    unnamed = ["messages"] if "messages" in roles and "messages" not in named else []
    return [*unnamed, *absent]


def _column(role: str, columns: Columns, names: Sequence[str], where: str) -> Finding:
    key, name = f"data.{role}_key", getattr(columns, role)
    usual = (alias for alias in USUAL.get(role, ()) if alias in names)
    near = _near(name, names, 0.6 if role == "messages" else 0.4) or next(usual, None)
    allowed = f"the columns are {', '.join(names) or 'none'}"
    return Finding(key, f"no column {name!r} in {where}", allowed, f"{key}={near or '<column>'}")


def _near(name: str | None, names: Sequence[str], cutoff: float) -> str | None:
    matches = difflib.get_close_matches(name, names, n=1, cutoff=cutoff) if name else []
    return next(iter(matches), None)


def _other_kind(rows: Sequence[Row], columns: Columns, kind: Kind) -> Kind | None:
    """Return the kind that the rows have, if it is another one.

    Prompts are no candidate, because nearly every row has one.
    """
    named = columns if columns.text else replace(columns, text=TEXT)
    others = (k for k in KINDS.values() if k is not kind and k is not PROMPTS)
    return next((k for k in others if any(_usable(rows, named, k))), None)


def _other_objective(
    rows: Sequence[Row], columns: Columns, objective: str, other: Kind, where: str
) -> Finding:
    sets = kind_for(objective).either
    roles = min((_missing(roles, list(rows[0].values), columns) for roles in sets), key=len)
    roles = roles or list(sets[-1])
    need = " and ".join(repr(getattr(columns, role)) for role in roles)
    keys = " ".join(f"data.{role}_key=<column>" for role in roles)
    override = f"train={'|'.join(other.objectives)}"
    if other is TEXTS:
        override = f"train=pretrain data.text_key={columns.text or TEXT}"
    elif objective == "sft" and other.name == "pairs":
        row = next(_usable(rows, columns, other))
        whole = not isinstance(row.values[columns.chosen], str)
        typed = f"data.prompt_key={columns.prompt} data.response_key={columns.chosen}"
        if whole and columns.prompt not in row.values:
            typed = f"data.messages_key={columns.chosen}"
        override += f", or {typed}"
    return Finding(
        "train.objective",
        f"{objective}, and {where} holds {other.name} without {need}",
        f"columns of other names: {keys}",
        override,
    )


def _none_usable(rows: Sequence[Row], columns: Columns, kind: Kind, what: str) -> list[Finding]:
    """Refuse columns of a wrong type: not one of the first rows can be used."""
    whole = [row for row in rows if not row.problem]
    if len(whole) < 2 or any(_usable(whole, columns, kind)):
        return []
    row = whole[0]
    try:
        kind.read(row.values, columns)
    except Unusable as reason:
        text = f"none of the first {len(whole)} rows can be used; {row.place}: {reason}"
        named = ", ".join(f"data.{role}_key" for role in kind.asked(columns))
        return [Finding(what, text, f"rows of {kind.name}", f"{named}: other columns, or {what}")]
    return []


def _usable(rows: Sequence[Row], columns: Columns, kind: Kind) -> Iterator[Row]:
    for row in rows:
        try:
            if not row.problem and kind.read(row.values, columns):
                yield row
        except Unusable:
            continue
