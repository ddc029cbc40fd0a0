"""What ZeRO leaves: is every rank there, do the files belong to one step, can it be gathered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.audit.catalogue import folder as of_folder
from tasks.audit.catalogue import zero as say
from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Finding, some
from tasks.audit.folder import by_number
from tasks.audit.recognise import Kind
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.deepspeed.layout import Layout, find_layout
from tasks.weights.deepspeed.ranks import rank_findings
from tasks.weights.deepspeed.states import read_model_state, read_optim_state
from tasks.weights.pickled.archive import read_archive
from tasks.weights.plan.partitions import read_partitions

MAX_PICKLE_BYTES = 64 << 20
"""Descriptions of tensors that are gone through, of all ranks together: some 30 s. Beyond it only
those of rank 0 are. Of a dense model of 80 layers a rank has some 0.1 MB under ZeRO-3, of one of
128 experts a layer 6 MB."""

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
    further = _further_down(source)
    if further:
        yield of_folder.NOTHING_HERE.at(
            "", found=f"{source.recognised.what} further down: {some(reversed(further))}",
            expected="one of them", fix=f"python flows/audit.py source={root / further[-1]}",
        )  # fmt: skip
        return
    try:
        layout = find_layout(root)
        described = _described(layout)
        if described > MAX_PICKLE_BYTES:
            yield from _by_names(source, layout, described)
            return
        found = read_zero(root)
    except ArtifactError as error:
        # Of a folder without a step the details are the names of those it has.
        told = any(one in error.message for one in error.details[:1])
        yield from _wrong(source, error.details if told else (error.message,))
        return
    held = f"ZeRO-{found.stage} of {found.world_size} ranks, {len(found.trained)} trained tensors"
    yield _not_gathered(source, found.root, held, found.step)


def _further_down(source: Source) -> list[str]:
    """Folders of checkpoints, the newest last, where the folder is one of a trainer's that holds
    them: `checkpoint-100/global_step100/`; empty where it is one itself."""
    files = [name for name in source.folder.files if name.endswith("_model_states.pt")]
    if any(name.count("/") < 2 for name in files):
        return []
    found = {name.rsplit("/", 2)[0] for name in files}
    return sorted(found, key=by_number)


def _by_names(source: Source, layout: Layout, described: int) -> Iterator[Finding]:
    """A checkpoint of very many ranks: are all there, by their names and what rank 0 says.

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
    held = f"ZeRO of {world} ranks, {sum(map(len, first.groups or ()))} trained tensors"
    yield _not_gathered(source, layout.root, held, first.step)
    count = len(layout.model) + len(layout.optim)
    yield say.ZERO_NOT_ALL_READ.at(
        "", found=f"{described >> 20} MiB describe the tensors of {count} files: rank 0's were "
        "read, the others are there by name",
        expected=f"at most {MAX_PICKLE_BYTES >> 20} MiB", fix=_gather(source),
    )  # fmt: skip


def _wrong(source: Source, said: Iterable[str]) -> Iterator[Finding]:
    """What readers say of such a checkpoint, by the codes that it stands for."""
    root = source.folder.root
    for one in said:
        text = one.replace(f"{root}/", "").removeprefix(f"{root}: ")
        entry = next((code for words, code in _CODES if re.search(words, text)), None)
        yield (entry or say.ZERO_UNUSABLE).at(
            "", found=text, expected="the files of all ranks of one step"
        )


def _not_gathered(source: Source, root: Path, held: str, step: int | None) -> Finding:
    where = "" if root == source.folder.root else root.name
    told = held if step is None else f"{held}, step {step}"
    return say.ZERO_NOT_GATHERED.at(where, found=told, expected="an adapter or a model")


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
    base = " base=<the base>" if found.mode == "adapter" else ""
    yield say.PARTITIONS_WHOLE.at(
        "", found=held, expected="an adapter or a model",
        fix=f"python flows/deliver.py source={source.folder.root}{base} out=<folder>",
    )  # fmt: skip


def _described(layout: Layout) -> int:
    """Bytes that describe tensors, of all ranks' files together. Raises ArtifactError."""
    paths = (*layout.model.values(), *layout.optim.values())
    records = (read_archive(path).records.get("data.pkl") for path in paths)
    return sum(one.nbytes for one in records if one is not None)
