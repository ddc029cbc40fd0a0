"""What ZeRO leaves: is every rank there, do the files belong to one step, can it be gathered."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.doctor.catalogue import zero as say
from tasks.doctor.catalogue.entry import Entry
from tasks.doctor.finding import Finding
from tasks.doctor.recognise import Kind
from tasks.doctor.source import Source
from tasks.errors import ArtifactError
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.deepspeed.layout import find_layout
from tasks.weights.partitions import read_partitions
from tasks.weights.pickled.archive import read_archive

MAX_PICKLE_BYTES = 256 << 20
"""Descriptions of tensors that are read, of all ranks together: some MB a rank."""

_CODES: tuple[tuple[str, Entry], ...] = (
    # what `read_zero` says; the code it stands for
    (r"latest.* names|steps and no file `latest`", say.ZERO_LATEST_DANGLING),
    (r"parallel|expert", say.ZERO_PARALLEL),
    (r"absent: |no \*_optim_states\.pt|are absent", say.ZERO_RANK_MISSING),
    (r"more than one |disagree on", say.ZERO_STEPS_MIXED),
    (
        r"world sizes|there are only|do not belong|two checkpoints in one|another file",
        say.ZERO_WORLD_DISAGREES,
    ),
    (r"no rank holds data|has no elements", say.ZERO_EMPTY),
)


def check(source: Source) -> Iterator[Finding]:
    """A checkpoint itself, or one that lies beside what was saved."""
    beside = [one for one in source.recognised.beside if "DeepSpeed" in one]
    if source.kind is Kind.DEEPSPEED:
        yield from _checkpoint(source)
    elif source.kind is Kind.SHARDS:
        yield from _partitions(source)
    elif beside and (source.is_adapter or source.is_model):
        broken = not source.tensors or any(not one.numel for one in source.tensors.values())
        rest = ": the saved weights are not whole, these may be" if broken else ""
        fix = _gather(source)
        yield say.ZERO_BESIDE.at("", found=beside[0] + rest, expected="one of them", fix=fix)


def _checkpoint(source: Source) -> Iterator[Finding]:
    root = source.folder.root
    try:
        _require_bounded(source)
        found = read_zero(root)
    except ArtifactError as error:
        # Of a folder without a step the details are the names of those it has.
        told = any(one in error.message for one in error.details[:1])
        for one in error.details if told else (error.message,):
            text = one.replace(f"{root}/", "").removeprefix(f"{root}: ")
            entry = next((code for words, code in _CODES if re.search(words, text)), None)
            yield (entry or say.ZERO_UNUSABLE).at(
                "", found=text, expected="the files of all ranks of one step"
            )
        return
    held = f"ZeRO-{found.stage} of {found.world_size} ranks, {len(found.trained)} trained tensors"
    step = "" if found.step is None else f", step {found.step}"
    where = "" if found.root == root else found.root.name
    yield say.ZERO_NOT_GATHERED.at(where, found=held + step, expected="an adapter or a model")


def _gather(source: Source) -> str:
    """The command that gathers the step beside what was saved; "" where no step can be told."""
    try:
        step = find_layout(source.folder.root).root
    except ArtifactError:
        return ""
    base = " base=<the base>" if source.is_adapter else ""
    return f"python flows/deliver.py source={step}{base} out=<folder>"


def _partitions(source: Source) -> Iterator[Finding]:
    """Our own ranks' parts."""
    try:
        found = read_partitions(source.folder.root)
    except ArtifactError as error:
        for one in error.details or (error.message,):
            yield say.PARTITIONS_UNUSABLE.at("", found=one, expected="every element once")
        return
    held = f"{found.world_size} ranks, {len(found.shapes)} tensors, {found.mode}"
    yield say.PARTITIONS_WHOLE.at("", found=held, expected="an adapter or a model")


def _require_bounded(source: Source) -> None:
    """Refuse a checkpoint whose descriptions take minutes to read. Raises ArtifactError."""
    layout = find_layout(source.folder.root)
    total = 0
    for path in (*layout.model.values(), *layout.optim.values()):
        record = read_archive(path).records.get("data.pkl")
        total += record.nbytes if record is not None else 0
    if total > MAX_PICKLE_BYTES:
        raise ArtifactError(
            f"{layout.root}: {total} bytes describe tensors, at most {MAX_PICKLE_BYTES} are read"
        )
