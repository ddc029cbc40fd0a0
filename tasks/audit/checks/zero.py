"""Checkpoints that are not gathered: DeepSpeed's states, FSDP's and Plumbline's partitions."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.audit.check import ERROR, INFO, Fault, also, check, some
from tasks.audit.folder import by_number
from tasks.audit.source import Kind, Source, command, deliver
from tasks.core.errors import ArtifactError
from tasks.weights.distributed import DistributedCheckpoint, read_distributed
from tasks.weights.shards import Partitions, read_partitions
from tasks.weights.zero import ZeroCheckpoint, find_step, read_zero

_STATES = "_model_states.pt"


@check(
    "ZERO_NOT_GATHERED", INFO,
    why="transformers, peft and vLLM find no weights in it; its trainer can resume from it",
    fix="{deliver}",
    issues="LLaMA-Factory #2604, LLaMA-Factory #2161",
)  # fmt: skip
def not_gathered(source: Source) -> Iterator[Fault]:
    """The partitions of every rank, complete, in place of a model or beside its saved weights."""
    read, root, place = source.once(_read), source.folder.root, ""
    if isinstance(read, Partitions):
        text = f"{read.world_size} ranks, {len(read.tensors)} tensors, {read.mode}"
        has_base = read.mode == "adapter"
    elif isinstance(read, ZeroCheckpoint | DistributedCheckpoint):
        text = f"{len(read.trained)} trained tensors"
        has_base = any(".lora_" in name for name in read.trained)
        if isinstance(read, ZeroCheckpoint):
            step = "" if read.step is None else f", step {read.step}"
            text = f"ZeRO-{read.stage} of {read.world_size} ranks, {text}{step}"
        else:
            text += f"; {read.left} of the optimizer are left out" if read.left else ""
            has_base = True
        place = "" if read.root == root else read.root.name
    else:
        yield from _beside(source)
        return
    fix = deliver(root, "<base>" if has_base else None)
    yield Fault(text, "an adapter or a model", file=place, fix=fix)


def _beside(source: Source) -> Iterator[Fault]:
    states = [text for text in source.recognised.beside if "DeepSpeed" in text]
    if not states or not (source.is_adapter or source.is_model):
        return
    broken = not source.tensors or any(not tensor.numel for tensor in source.tensors.values())
    rest = ": the saved weights are broken, these may be intact" if broken else ""
    try:
        base = source.base.folder.root if source.base is not None else "<base>"
        step = find_step(source.folder.root)
        fix = deliver(step, base if source.is_adapter else None)
    except ArtifactError:
        fix = ""
    yield Fault(f"{states[0]} beside the saved weights{rest}", "one of them", fix=fix)


@check(
    "ZERO_UNUSABLE", ERROR,
    why="no tool can make a model of them, or it combines several runs into one that never was",
    fix="copy the files of every rank of one step again, or use another step",
    issues="OpenRLHF #1067, OpenRLHF PR #1208",
)  # fmt: skip
def unusable(source: Source) -> Iterator[Fault]:
    """Partitions that are incomplete, damaged, of several runs, or of another kind of training."""
    read, root = source.once(_read), source.folder.root
    for message in read if isinstance(read, list) else ():
        text = message.replace(f"{root}/", "").removeprefix(f"{root}: ")
        yield Fault(text, "the files of all ranks of one step")


@also("NOTHING_HERE")
def several_steps(source: Source) -> Iterator[Fault]:
    """Several DeepSpeed checkpoints in subfolders."""
    further = _below(source)
    if further:
        text = f"{source.recognised.what} in subfolders: {some(reversed(further))}"
        fix = command("audit", source=source.folder.root / further[-1])
        yield Fault(text, "one of them", fix=fix)


def _read(
    source: Source,
) -> ZeroCheckpoint | DistributedCheckpoint | Partitions | list[str] | None:
    """Read the partitions; returns the reasons as a list if they are unusable."""
    try:
        if source.kind is Kind.SHARDS:
            return read_partitions(source.folder.root)
        if source.kind is Kind.DISTRIBUTED:
            return read_distributed(source.folder.root)
        if source.kind is Kind.DEEPSPEED and not _below(source):
            return read_zero(source.folder.root)
    except ArtifactError as error:
        return list(error.details) or [error.message]
    return None


def _below(source: Source) -> list[str]:
    """Return folders of checkpoints below this one, the newest last; empty if it is one itself.

    A trainer's output folder holds them as `checkpoint-100/global_step100/`.
    """
    if source.kind is not Kind.DEEPSPEED:
        return []
    states = [name for name in source.folder.files if name.endswith(_STATES)]
    if any(name.count("/") < 2 for name in states):
        return []
    return sorted({name.rsplit("/", 2)[0] for name in states}, key=by_number)
