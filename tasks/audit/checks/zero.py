"""Check ZeRO checkpoints: every rank exists, the files belong to one step, gathering works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.audit.catalogue.files import Folders as files
from tasks.audit.catalogue.tensors import Zero as findings
from tasks.audit.finding import Finding, some
from tasks.audit.folder import by_number
from tasks.audit.recognise import Kind
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError, Coded
from tasks.core.terminal import typed
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.deepspeed.layout import Layout, find_layout
from tasks.weights.deepspeed.ranks import rank_findings
from tasks.weights.deepspeed.states import read_model_state, read_optim_state
from tasks.weights.pickled.archive import read_archive
from tasks.weights.plan.partitions import read_partitions

MAX_PICKLE_BYTES = 64 << 20
"""Most bytes of tensor descriptions to read, of all ranks together: about 30 s. Above it only rank
0 is read. A rank of a dense model of 80 layers has about 0.1 MB under ZeRO-3; with 128 experts per
layer it has 6 MB."""

_ENTRIES = {
    entry.code: entry
    for entry in (
        findings.ZERO_EMPTY, findings.ZERO_LATEST_DANGLING, findings.ZERO_PARALLEL,
        findings.ZERO_RANK_MISSING, findings.ZERO_STEPS_MIXED, findings.ZERO_WORLD_DISAGREES,
    )
}  # fmt: skip
"""Entries by the code of an error of `tasks.weights.deepspeed`."""


def check(source: Source) -> Iterator[Finding]:
    """Check a ZeRO checkpoint or Plumbline's shards; report one beside saved weights."""
    beside = [text for text in source.recognised.beside if "DeepSpeed" in text]
    if source.kind is Kind.DEEPSPEED:
        yield from _checkpoint(source)
    elif source.kind is Kind.SHARDS:
        yield from _partitions(source)
    elif beside and (source.is_adapter or source.is_model):
        broken = not source.tensors or any(not tensor.numel for tensor in source.tensors.values())
        rest = ": the saved weights are broken, these may be intact" if broken else ""
        fix = _gather(source)
        yield findings.ZERO_BESIDE.at("", found=beside[0] + rest, expected="one of them", fix=fix)


def _checkpoint(source: Source) -> Iterator[Finding]:
    root = source.folder.root
    further = _checkpoints_below(source)
    if further:
        yield files.NOTHING_HERE.at(
            "", found=f"{source.recognised.what} in subfolders: {some(reversed(further))}",
            expected="one of them",
            fix=f"python flows/audit.py {typed('source', root / further[-1])}",
        )  # fmt: skip
        return
    try:
        layout = find_layout(root)
        described = _described(layout)
        if described > MAX_PICKLE_BYTES:
            yield from _by_names(source, layout, described)
            return
        checkpoint = read_zero(root)
    except ArtifactError as error:
        # An error with a code of its own is about the folder; its details are names of steps.
        own = error.code or not error.details
        yield from _wrong(source, [Coded(error.message, error.code)] if own else error.details)
        return
    ranks, trained = checkpoint.world_size, len(checkpoint.trained)
    summary = f"ZeRO-{checkpoint.stage} of {ranks} ranks, {trained} trained tensors"
    yield _not_gathered(source, checkpoint.root, summary, checkpoint.step)


def _checkpoints_below(source: Source) -> list[str]:
    """Return folders of checkpoints below this one, the newest last; empty if it is one itself.

    A trainer's output folder holds them as `checkpoint-100/global_step100/`.
    """
    states = [name for name in source.folder.files if name.endswith("_model_states.pt")]
    if any(name.count("/") < 2 for name in states):
        return []
    parents = {name.rsplit("/", 2)[0] for name in states}
    return sorted(parents, key=by_number)


def _by_names(source: Source, layout: Layout, described: int) -> Iterator[Finding]:
    """Check a checkpoint of very many ranks by file names and by the content of rank 0.

    Raises:
        ArtifactError: rank 0's files cannot be read.
    """
    first = read_model_state(layout.model[min(layout.model)])
    ranks = [read_optim_state(layout.optim[rank]) for rank in sorted(layout.optim)[:1]]
    wrong = list(rank_findings(layout, [first], ranks))
    yield from _wrong(source, wrong)
    if wrong:
        return
    world = ranks[0].partitions if ranks else first.world_size or len(layout.model)
    summary = f"ZeRO of {world} ranks, {sum(map(len, first.groups or ()))} trained tensors"
    yield _not_gathered(source, layout.root, summary, first.step)
    count = len(layout.model) + len(layout.optim)
    yield findings.ZERO_NOT_ALL_READ.at(
        "", found=f"{described >> 20} MiB describe the tensors of {count} files: rank 0's were "
        "read, the others only counted",
        expected=f"at most {MAX_PICKLE_BYTES >> 20} MiB", fix=_gather(source),
    )  # fmt: skip


def _wrong(source: Source, messages: Iterable[str]) -> Iterator[Finding]:
    """Turn messages of the readers into findings of the same code."""
    root = source.folder.root
    for message in messages:
        text = message.replace(f"{root}/", "").removeprefix(f"{root}: ")
        entry = _ENTRIES.get(getattr(message, "code", ""), findings.ZERO_UNUSABLE)
        yield entry.at("", found=text, expected="the files of all ranks of one step")


def _not_gathered(source: Source, root: Path, summary: str, step: int | None) -> Finding:
    where = "" if root == source.folder.root else root.name
    contents = summary if step is None else f"{summary}, step {step}"
    return findings.ZERO_NOT_GATHERED.at(where, found=contents, expected="an adapter or a model")


def _gather(source: Source) -> str:
    """Return the command that gathers the step beside the saved weights; "" if no step is found."""
    try:
        step = find_layout(source.folder.root).root
    except ArtifactError:
        return ""
    base = " base=<the base>" if source.is_adapter else ""
    return f"python flows/deliver.py {typed('source', step)}{base} out=<folder>"


def _partitions(source: Source) -> Iterator[Finding]:
    """Check Plumbline's own shards."""
    try:
        partitions = read_partitions(source.folder.root)
    except ArtifactError as error:
        for reason in error.details or (error.message,):
            yield findings.PARTITIONS_UNUSABLE.at("", found=reason, expected="every element once")
        return
    summary = f"{partitions.world_size} ranks, {len(partitions.shapes)} tensors, {partitions.mode}"
    base = " base=<the base>" if partitions.mode == "adapter" else ""
    yield findings.PARTITIONS_WHOLE.at(
        "", found=summary, expected="an adapter or a model",
        fix=f"python flows/deliver.py {typed('source', source.folder.root)}{base} out=<folder>",
    )  # fmt: skip


def _described(layout: Layout) -> int:
    """Return the size in bytes of all pickles that describe tensors. Raises ArtifactError."""
    paths = (*layout.model.values(), *layout.optim.values())
    records = (read_archive(path).records.get("data.pkl") for path in paths)
    return sum(record.nbytes for record in records if record is not None)
