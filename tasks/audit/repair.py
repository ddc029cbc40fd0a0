"""Write a repaired copy of a checkpoint, if no data is lost: `repaired = repair(folder, out)`.

The copy has safetensors in place of pickles, names without prefixes of wrappers, a new index, and
no weight files that belong to another save. Settings are not edited: the `fix` of their findings
is the line to write. The copy is audited before it is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.audit.check import Finding, errors_of, examine
from tasks.audit.known import cannot_rename, new_names
from tasks.audit.source import Source, open_source
from tasks.core.errors import ConfigError, ContractError, first_and_more
from tasks.core.files import open_up
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.weights.files.documents import MANIFEST
from tasks.weights.files.folder import copy_side_file
from tasks.weights.plan import Plan, as_is
from tasks.weights.write import write

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_NOT_COPIED = (*_PICKLES, ".safetensors", ".index.json")
_MAX_SHARD_BYTES = 5_000_000_000
_INPUT = "source"


def repair(root: Path, out: Path, *, base: Path | None = None) -> Artifact:
    """Write a repaired copy of a folder, which is only read, to an absent or empty folder.

    Its manifest notes what was `repaired`. Raises ConfigError if `out` is not empty or there is
    nothing to repair, and ContractError with every reason if that would invent data.
    """
    if _within(out, root) or _within(root, out):
        raise ConfigError(
            f"out_dir={out} and source={root}: one contains the other; the source is never changed",
            hint="out_dir=<a folder elsewhere>",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out_dir={out} is not empty", hint="out_dir=<a new folder>")
    source = open_source(root, base, values=False)
    findings = examine(source)
    if not (source.is_model or source.is_adapter):
        raise ContractError(
            f"{root}: {source.what}: only models and adapters are repaired",
            details=_lines(errors_of(findings)),
        )
    errors = [finding for finding in errors_of(findings) if not finding.repairable]
    reasons = [*cannot_rename(source), *_lines(errors)]
    if reasons:
        raise ContractError(
            f"{root}: not everything can be repaired without loss: {first_and_more(reasons)}",
            details=reasons,
            hint=errors[0].fix if errors else "",
        )
    done = [f"{finding.code}: {finding.found}" for finding in findings if finding.repairable]
    if not done:
        raise ConfigError(f"{root}: there is nothing to repair")
    return _write(source, out, done)


def _write(source: Source, out: Path, done: list[str]) -> Artifact:
    kind, stem = ("adapter", "adapter_model") if source.is_adapter else ("weights", "model")
    names, folder = new_names(source), source.folder
    renamed = [f"{old} is now {new}" for new, old in names.items() if new != old]
    done += [first_and_more(renamed)] if renamed else []
    tensors = {new: source.tensors[old] for new, old in names.items()}
    plan = Plan(as_is(tensors, _INPUT).ops, max_shard_bytes=_MAX_SHARD_BYTES)
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as work:
        write(plan, {_INPUT: tensors}, work, stem)
        for name in folder.files:
            if _is_copied(name):
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                copy_side_file(folder.root / name, work / name, folder.root)
            elif "/" in name:
                done.append(f"left out: {name}")
        base = source.base.root if source.base is not None else None
        findings = examine(open_source(work, base, values=False))
        if errors := errors_of(findings):
            raise ContractError(f"{out}: the copy still has errors", details=_lines(errors))
        if out.is_dir():
            out.rmdir()  # else `publish` would treat the empty folder as an older artifact
        notes = {"repaired": done}
        artifact = publish(work, out, Origin(kind, "audit", out.name, notes=notes))
    open_up(out)
    return artifact


def _is_copied(name: str) -> bool:
    """Return True for all files but the weights, and in subfolders for all but pickles."""
    left_out = _PICKLES if "/" in name else _NOT_COPIED
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not (name.endswith(left_out) or hidden or name == MANIFEST)


def _within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{finding.code}: {finding.where}: {finding.found} -> {finding.fix}" for finding in findings
    ]
