"""Write a draft: settle tied embeddings, write the files, check them, publish by one rename."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.audit.checks.adapters.same_bytes import differ
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.examine import examine
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG
from tasks.audit.repair.draft import Draft
from tasks.audit.repair.drafting import HEAD, drafted, errors_of
from tasks.audit.source import open_source
from tasks.core.errors import ConfigError, ContractError, first_and_more
from tasks.core.private import open_up
from tasks.core.terminal import typed
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.weights.execute.execute import execute
from tasks.weights.files.side_files import copy_side_file
from tasks.weights.heads.detect import Found
from tasks.weights.heads.split import write_value_head
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate

MAX_SHARD_BYTES = 5_000_000_000
_SHOWN = 50
_INPUT = "source"


@dataclass(frozen=True)
class Repaired:
    """The result of a repair.

    Attributes:
        artifact: the new folder.
        done: descriptions of the changes, one line each.
        findings: remaining findings, none of them an error.
    """

    artifact: Artifact
    done: tuple[str, ...]
    findings: tuple[Finding, ...]


def repair(root: Path, out: Path, *, base: Path | None = None) -> Repaired:
    """Write a repaired copy of a folder.

    Args:
        root: the folder; it is only read.
        out: the new folder; absent or empty.
        base: folder of the base, as for an audit.

    Raises:
        ConfigError: `out` is not empty, or there is nothing to repair.
        ContractError: something cannot be repaired without inventing data; lists every reason.
        ArtifactError: a file cannot be read or written.
    """
    _require_free(root, out)
    source = open_source(root, base)
    if not (source.is_model or source.is_adapter):
        raise ContractError(
            f"{root}: {source.recognised.what}: only models and adapters are repaired",
            details=_lines(errors_of(examine(source))),
        )
    draft, head = drafted(source, examine(source))
    _settle_ties(draft)
    _refuse(root, draft)
    return _write(draft, head, out)


def _settle_ties(draft: Draft) -> None:
    """Drop the copy, or untie the two, in a model that ties its embeddings and stores both.

    Raises:
        ArtifactError: the tensors cannot be read.
    """
    source = draft.source
    tensors = {new: source.tensors[old] for new, old in draft.names.items()}
    embeddings = embeddings_of(tensors, source.config())
    if not (source.is_model and embeddings.tied and embeddings.input and embeddings.output):
        return
    head, embedding = draft.names[embeddings.output], draft.names[embeddings.input]
    same = tensors[embeddings.output].shape == tensors[embeddings.input].shape and (
        tensors[embeddings.output].dtype == tensors[embeddings.input].dtype
    )
    if same and not differ((source, head), (source, embedding)):
        del draft.names[embeddings.output]
        draft.done.append(
            f"{embeddings.output}: left out, it equals {embeddings.input} byte for byte"
        )
        return
    draft.edit(CONFIG, tie_word_embeddings=False)
    draft.done.append(f"{CONFIG}: tie_word_embeddings is false: the two differ")


def _refuse(root: Path, draft: Draft) -> None:
    """Raise if the draft still has errors, or changes nothing."""
    errors = errors_of(examine(draft.as_source()))
    # Refused repairs are the cause of the remaining errors.
    reasons = draft.refused or _lines(errors)
    if reasons:
        raise ContractError(
            f"{root}: not everything can be repaired without loss: {first_and_more(reasons)}",
            details=reasons[:_SHOWN],
            hint=""
            if draft.refused
            else errors[0].fix.replace("source=DIR", typed("source", root)),
        )
    if not draft.done:
        raise ConfigError(f"{root}: there is nothing to repair")


def _write(draft: Draft, head: Found | None, out: Path) -> Repaired:
    kind = "adapter" if draft.source.is_adapter else "weights"
    stem = "adapter_model" if draft.source.is_adapter else "model"
    tensors = draft.tensors
    plan = Plan(as_is(tensors, _INPUT).ops, max_shard_bytes=MAX_SHARD_BYTES)
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as work:
        validate(plan, {_INPUT: tensors}, out=work)
        execute(plan, {_INPUT: tensors}, work, stem=stem)
        folder, copied = draft.source.folder, draft.copied()
        for name in copied:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            copy_side_file(folder.root / name, work / name, folder.root)
        lost = [name for name in folder.files if "/" in name and name not in copied]
        draft.done += [f"left out {first_and_more(lost)}"] if lost else []
        for name, document in draft.documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            (work / name).write_text(document if isinstance(document, str) else text, newline="")
        if head is not None:
            (work / HEAD).mkdir(exist_ok=True)
            write_value_head(head, work / HEAD)
        base = draft.source.base
        findings = examine(open_source(work, base.folder.root if base is not None else None))
        errors = errors_of(findings)
        if errors:  # the draft had none, so the files differ from the draft
            raise ContractError(
                f"{out}: the repaired copy differs from the plan", details=_lines(errors)
            )
        if out.is_dir():
            out.rmdir()  # else `publish` would treat the empty folder as an older artifact
        artifact = publish(
            work, out, Origin(kind, "audit", out.name, notes={"repaired": draft.done})
        )
    open_up(out)
    return Repaired(artifact, tuple(draft.done), tuple(findings))


def _require_free(root: Path, out: Path) -> None:
    if out.resolve().is_relative_to(root.resolve()) or root.resolve().is_relative_to(out.resolve()):
        raise ConfigError(
            f"out_dir={out} and source={root}: one contains the other; the source is never changed",
            hint="out_dir=<a folder elsewhere>",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out_dir={out} is not empty", hint="out_dir=<a new folder>")


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{finding.code}: {finding.where}: {finding.found} -> {finding.fix}" for finding in findings
    ]
