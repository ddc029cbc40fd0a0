"""Read DeepSpeed's own checkpoints (ZeRO stages 0 to 3) without DeepSpeed.

    checkpoint = read_zero(folder)                 # what `save_checkpoint` wrote, or one step of it
    checkpoint.tensors["lm_head.weight"].shape     # by live name, as byte ranges of the files

Nothing is unpickled and no tensor is loaded: the plan is made from the files' tables.

ZeRO-1 and 2 flatten a parameter group, pad it and cut it into equal partitions, one per rank: a
parameter lies in one or two neighbouring partitions, sometimes more. ZeRO-3 partitions each
parameter: every rank holds `ceil(numel / ranks)` elements of it, the last ones padded, at the same
offset of its own flat groups. Reference: DeepSpeed's `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py`, `utils/zero_to_fp32.py`. ZeRO: https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.dtypes import ITEM_BITS, casts, is_float, widened
from tasks.weights.files.reader import weight_files
from tasks.weights.files.tensors import Extent, Reader, Tensor, Tensors, part, read_all
from tasks.weights.pickled.torch_file import is_shape, read_torch_file
from tasks.weights.pickled.unpickler import Foreign

Shapes = Mapping[str, tuple[int, ...]]

_FILE = re.compile(
    r"(?:[a-z0-9]+_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+(?:_\d+)?)_"
    r"(?P<kind>model|optim)_states\.pt"
)
_FOREIGN = re.compile(r"layer_|expp_rank|.*expert|.*_model_states\.pt|.*optim_states\.pt")
_SAMPLE = 32
"""Number of elements compared at each end of a tensor."""
_STEP, _TINY = 2.0**-7, 1e-6
"""Relative and absolute tolerance. bf16 rounds by at most 2**-9 and fp16 by less; a wrong tensor
differs by its own size."""
_SHOWN = 50
_OTHER = "tensor, pipeline or expert parallel training: convert the checkpoint with its trainer"


@dataclass(frozen=True)
class ZeroCheckpoint:
    """An opened checkpoint: all tensors by live name.

    Trained parameters are in fp32, frozen ones and buffers in the dtype that training used.
    """

    tensors: Tensors
    root: Path  # folder of the step
    stage: int  # 0 (no ZeRO) to 3
    world_size: int
    step: int | None
    trained: tuple[str, ...]
    buffers: frozenset[str]
    tied: Mapping[str, str]  # name -> name in `tensors` that holds the same tensor


def read_zero(folder: Path) -> ZeroCheckpoint:
    """Open a checkpoint of ZeRO-0 to 3; only the files' tables are read.

    `folder` is that which `save_checkpoint` wrote to, or that of one step in it. Raises
    ArtifactError with all findings: missing ranks, mixed steps, sizes that do not add up, empty
    tensors, another kind of parallelism.
    """
    root = find_step(folder)
    if (root / "zero").is_dir():
        raise ArtifactError(
            f"{root}: a universal checkpoint, which only DeepSpeed reads",
            details=["a universal checkpoint: give the checkpoint that it was converted from"],
            hint="source=<the checkpoint that it was converted from>",
        )
    findings: list[str] = []
    files = _files(root, findings)
    models: list[_Model] = _read_all(files["model"], _read_model, findings)
    ranks: list[_Optim] = _read_all(files["optim"], _read_optim, findings)
    tensors: dict[str, Tensor] = {}
    findings += [] if findings else _rank_findings(files, models, ranks)
    if not findings:
        tensors = _trained(models[0], ranks, findings) if ranks else {}
        findings += [] if models[0].is_partition else _disagreements(models[0], tensors)
        tensors |= _untrained(models, findings)
        findings += [
            f"{name}: has no elements, shape {list(tensor.shape)}"
            for name, tensor in tensors.items()
            if not tensor.numel and name not in models[0].buffers
        ]
        if not tensors and not findings:
            findings.append("no tensor at all")
    if findings:
        raise ArtifactError(
            f"{root}: not a complete checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="copy the files of every rank of one step into the folder, or use another step",
        )
    first = models[0]
    return ZeroCheckpoint(
        tensors={name: tensors[name] for name in first.module if name in tensors} | tensors,
        root=root,
        stage=3 if first.is_partition else ranks[0].stage if ranks else 0,
        world_size=ranks[0].partitions if ranks else first.world_size or 1,
        step=first.step,
        trained=tuple(first.shapes),
        buffers=first.buffers & set(tensors),
        tied={alias: name for alias, name in first.tied.items() if name in tensors},
    )


def find_step(folder: Path) -> Path:
    """Return the folder of a step: `folder`, the one that `latest` names, or the only one."""
    if weight_files(folder, "*_model_states.pt"):
        return folder
    steps = sorted({path.parent.name for path in weight_files(folder, "*/*_model_states.pt")})
    latest = folder / "latest"
    tag = latest.read_text(errors="replace")[:256].strip() if latest.is_file() else ""
    if tag in steps:
        return folder / tag
    if len(steps) == 1 and not tag:
        return folder / steps[0]
    if not steps:
        raise ArtifactError(f"{folder}: no DeepSpeed checkpoint: no *_model_states.pt")
    named = f"latest names {tag!r}, which is not one of them" if tag else "no file `latest`"
    raise ArtifactError(
        f"{folder}: steps {', '.join(steps)}, and {named}", hint="name the step's folder itself"
    )


def _files(root: Path, findings: list[str]) -> dict[str, dict[int, Path]]:
    """Return the files by kind and rank."""
    files: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in weight_files(root, "*.pt"):
        match = _FILE.fullmatch(path.name)
        if match is None or match["mp"].strip("0"):
            if match or _FOREIGN.match(path.name):
                findings.append(f"{path.name}: not the name of a rank's states, or {_OTHER}")
            continue
        of_kind, rank = files[match["kind"]], int(match["rank"] or 0)
        if rank in of_kind:
            findings.append(f"{path.name}: rank {rank} has another file, {of_kind[rank].name}")
        of_kind[rank] = path
    return files


# The states of one rank


@dataclass(frozen=True)
class _Model:
    """Contents of a `*model_states.pt`; numbers are None if they are not stored."""

    is_partition: bool  # one of ZeRO-3's, with placeholders for parameters
    module: Tensors  # the state dict
    buffers: frozenset[str]
    groups: list[Shapes] | None  # trained, in the order of the flat groups; None without ZeRO
    frozen: Shapes  # empty if frozen parameters were not saved
    fragments: Tensors  # frozen: this rank's partition under ZeRO-3, else full
    tied: Mapping[str, str]  # name -> name of the parameter that holds the same tensor
    step: int | None
    world_size: int | None
    shapes: Shapes  # of all groups


@dataclass(frozen=True)
class _Optim:
    """Contents of a `*optim_states.pt`: this rank's part of the fp32 weights."""

    stage: int
    partitions: int  # of each group
    flat: list[Tensor]  # one 1-D tensor per group
    paddings: Any  # after each parameter of each group, in elements; None if there are none
    step: bytes | None  # of the inner optimizer, to compare


def _read_all(
    files: Mapping[int, Path], read: Callable[[Path, Any], Any], findings: list[str]
) -> list[Any]:
    states = []
    for _, path in sorted(files.items()):
        try:
            states.append(read(path, read_torch_file(path)))
        except ArtifactError as error:
            findings.append(error.message)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            findings.append(f"{path}: not DeepSpeed's states, or {_OTHER}: {error!s:.200}")
    return states


def _read_model(path: Path, raw: Any) -> _Model:
    if _count(raw.get("mp_world_size")) not in (None, 1) or raw.get("autoep_layers"):
        raise ValueError("another parallelism")
    groups, shapes = raw.get("param_shapes"), {}
    if groups is not None:
        # Names twice, also of one long group: few bytes could expand to any amount of memory.
        if len({id(group) for group in groups}) < len(groups):
            raise ValueError("param_shapes holds one group twice")
        groups = [_shapes(group) for group in groups]
        shapes = {name: shape for group in groups for name, shape in group.items()}
        if len(shapes) < sum(map(len, groups)):
            raise ValueError("a parameter in two groups of param_shapes")
    module = {
        name: value
        for name, value in raw["module"].items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    shared = _named(raw.get("shared_params") or {}, str)
    tied = {alias: name for alias, name in shared.items() if alias not in shapes}
    holders: dict[object, str] = {}
    for name, tensor in module.items() if groups is None else ():  # DeepSpeed lists none
        holder = holders.setdefault((tensor.extents, tensor.shape), name)
        if holder != name and tensor.extents:
            tied[name] = holder
    return _Model(
        is_partition="zero_pp_rank" in path.name,
        module=module,
        buffers=frozenset(raw.get("buffer_names") or ()),
        groups=groups,
        frozen=_shapes(raw.get("frozen_param_shapes") or {}),
        fragments=_named(raw.get("frozen_param_fragments") or {}, Tensor),
        tied=tied,
        step=_count(raw.get("global_steps")),
        world_size=_count(raw.get("dp_world_size")),
        shapes=shapes,
    )


def _named(entries: Any, kind: type) -> dict[str, Any]:
    """Return a dictionary by name. Raises ValueError if an entry is of another kind."""
    for name, entry in entries.items():
        if not (isinstance(name, str) and isinstance(entry, kind)):
            raise ValueError(f"an unexpected entry {name!a:.200}")
    return dict(entries)


def _shapes(group: Any) -> Shapes:
    if not all(map(is_shape, _named(group, object).values())):
        raise ValueError("a shape that is not a list of sizes")
    return {name: tuple(shape) for name, shape in group.items()}


def _read_optim(path: Path, raw: Any) -> _Optim:
    raw = raw["optimizer_state_dict"]
    # BF16_Optimizer partitions like ZeRO-1 and does not store a stage.
    stage = _count(raw["zero_stage"]) if "zero_stage" in raw else 1
    counts = raw.get("partition_count")
    partitions = {_count(n) for n in counts} if isinstance(counts, list) else {_count(counts)}
    if stage not in (1, 2, 3) or len(partitions) != 1 or None in partitions:
        raise ValueError(f"zero_stage {stage}, partition_count is not one number")
    flat = raw.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not flat or not all(isinstance(tensor, Tensor) and tensor.extents for tensor in flat):
        raise ArtifactError(f"{path}: holds no fp32 weights: offloaded to NVMe, or stripped")
    step = _step(raw.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state"))
    return _Optim(stage, partitions.pop() or 0, flat, raw.get("param_alignment_paddings"), step)


def _count(value: Any) -> int | None:
    """Return an integer; an enumeration member is pickled as its class and its value."""
    if isinstance(value, Foreign) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None


def _step(inner: Any) -> bytes | None:
    """Return the first step count in an optimizer's state, in whichever form it is stored."""
    state = inner.get("state") if isinstance(inner, dict) else inner
    entries = list(state.values()) if isinstance(state, dict) else state
    for entry in entries if isinstance(entries, list) else ():
        step = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(step, Tensor) and step.numel == 1:
            return read_all(step).tobytes()
        if isinstance(step, int | float):
            return str(step).encode()
    return None


def _rank_findings(
    files: Mapping[str, Mapping[int, Path]], models: Sequence[_Model], ranks: Sequence[_Optim]
) -> Iterator[str]:
    """Yield one line for everything that is wrong with the set of files."""
    first = models[0]
    if first.groups is None:
        if ranks:
            yield "parts of a ZeRO optimizer beside a model without ZeRO"
        return
    if not ranks:
        yield f"no *_optim_states.pt: the fp32 weights of all {first.world_size} ranks are absent"
        return
    kinds = {(rank.stage, rank.partitions) for rank in ranks}
    if len(kinds) > 1 or {model.is_partition for model in models} != {ranks[0].stage == 3}:
        yield f"files of several checkpoints: (stage, ranks) of the optimizer {sorted(kinds)}"
        return
    world = ranks[0].partitions
    for kind in ("optim", "model") if first.is_partition else ("optim",):
        absent = next((rank for rank in range(world) if rank not in files[kind]), None)
        if absent is not None or len(files[kind]) > world:
            yield f"{kind} states of {len(files[kind])} ranks, of {world} ranks; absent: {absent}"
    if len({model.step for model in models}) > 1:
        yield "ranks' files of more than one step: an overwritten checkpoint"
    # A rank that holds only padding has no optimizer state and therefore no step.
    if len({rank.step for rank in ranks} - {None}) > 1:
        yield "ranks' files of more than one optimizer step: an overwritten checkpoint"
    if any(model.groups != first.groups or model.frozen != first.frozen for model in models):
        yield "ranks disagree on the parameters' shapes"


# The tensors


def _trained(first: _Model, ranks: Sequence[_Optim], findings: list[str]) -> dict[str, Tensor]:
    """Return the trained parameters, in fp32, in the order of training's groups."""
    dtypes = {tensor.dtype for rank in ranks for tensor in rank.flat}
    if len(dtypes) != 1 or not is_float(dtype := next(iter(dtypes))):
        findings.append(f"flat groups of {', '.join(sorted(dtypes))}, not of one float dtype")
        return {}
    item = ITEM_BITS[dtype] // 8
    if ranks[0].stage == 3:
        located = _by_parameter(first.shapes, ranks, item, findings)
    else:
        located = _by_group(first.groups or (), ranks, item, findings)
    return {name: Tensor(first.shapes[name], dtype, tuple(e)) for name, e in located.items()}


def _by_group(
    groups: Sequence[Shapes], ranks: Sequence[_Optim], item: int, findings: list[str]
) -> dict[str, list[Extent]]:
    """Find each parameter in the concatenation of its group over all ranks."""
    counts = {len(rank.flat) for rank in ranks}
    if counts != {len(groups)}:
        findings.append(f"{len(groups)} parameter groups, but flat groups: {sorted(counts)}")
        return {}
    located: dict[str, list[Extent]] = {}
    for index, shapes in enumerate(groups):
        flat = [extent for rank in ranks for extent in rank.flat[index].extents]
        pads: Any = [0] * len(shapes)
        if isinstance(ranks[0].paddings, list):
            pads = ranks[0].paddings[index] if index < len(ranks[0].paddings) else []
        known = isinstance(pads, list | tuple) and len(pads) == len(shapes)
        if not known or not all(type(n) is int and n >= 0 for n in pads):
            findings.append(f"group {index}: no padding for each of {len(shapes)} parameters")
            continue
        sizes = [prod(shape) for shape in shapes.values()]
        starts = [0, *accumulate(size + pad for size, pad in zip(sizes, pads, strict=True))]
        # The group is padded to a multiple of twice the number of ranks.
        end, unit, have = starts[-1], 2 * len(ranks), sum(rank.flat[index].numel for rank in ranks)
        if end > have or -(-end // unit) != -(-have // unit):
            findings.append(f"group {index}: parameters need {end} elements, the ranks hold {have}")
            continue
        for name, start, size in zip(shapes, starts, sizes, strict=False):
            located[name] = part(flat, start * item, size * item)
    return located


def _by_parameter(
    shapes: Shapes, ranks: Sequence[_Optim], item: int, findings: list[str]
) -> dict[str, list[Extent]]:
    """Find each parameter's partitions at the same offset of every rank's concatenated groups."""
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    shares = {name: -(-size // len(ranks)) for name, size in sizes.items()}
    need = sum(shares.values())
    sums = [sum(tensor.numel for tensor in rank.flat) for rank in ranks]
    wrong = [number for number, count in enumerate(sums) if count != need]
    findings += [f"rank {n}: parameters need {need} elements, it has {sums[n]}" for n in wrong]
    if wrong:
        return {}
    flats = [[extent for tensor in rank.flat for extent in tensor.extents] for rank in ranks]
    starts = accumulate(shares.values(), initial=0)
    located: dict[str, list[Extent]] = {}
    for (name, share), start in zip(shares.items(), starts, strict=False):
        padded = [extent for flat in flats for extent in part(flat, start * item, share * item)]
        located[name] = part(padded, 0, sizes[name] * item)
    return located


def _untrained(models: Sequence[_Model], findings: list[str]) -> dict[str, Tensor]:
    """Return frozen parameters and buffers.

    Under ZeRO-3 each rank holds a partition of a frozen parameter. ZeRO-1 does not list them, but
    its module contains them.
    """
    first, tensors = models[0], {}
    known = {*first.shapes, *first.tied}
    rest = [name for name in {**first.module, **first.fragments} if name not in known]
    if first.is_partition:
        findings += [
            f"{name}: a parameter of the model, but no rank holds data of it"
            for name in rest
            if name not in first.buffers and name not in first.frozen
        ]
        rest = [name for name in rest if name in first.buffers]
        for name, shape in first.frozen.items():
            numel, share = prod(shape), -(-prod(shape) // len(models))
            parts = [model.fragments[name] for model in models if name in model.fragments]
            sizes = [tensor.numel for tensor in parts if tensor.extents]
            if sizes != [share] * len(models) or len({tensor.dtype for tensor in parts}) > 1:
                findings.append(f"{name}: frozen, {numel} elements; not a partition on each rank")
                continue
            padded = [extent for tensor in parts for extent in tensor.extents]
            extents = part(padded, 0, numel * ITEM_BITS[parts[0].dtype] // 8)
            tensors[name] = Tensor(shape, parts[0].dtype, tuple(extents))
    for name in rest:
        tensors[name] = first.fragments.get(name) or first.module[name]
        if tensors[name].numel and not tensors[name].extents:
            findings.append(f"{name}: not contiguous, shape {list(tensors[name].shape)}")
    return tensors


def _disagreements(state: _Model, weights: Tensors) -> Iterator[str]:
    """Yield one line for every trained weight whose fp32 values differ from the module's.

    Below ZeRO-3 a checkpoint holds each weight twice: as a full tensor in 16 bits, and partitioned
    in fp32. A few elements of every tensor are compared, since sizes alone cannot reveal a wrong
    order of files.
    """
    for name, tensor in weights.items():
        own = state.module.get(name)
        if own is None:
            yield f"{name}: trained, but not in the module"
        elif own.shape != tensor.shape or (own.numel and not own.extents):
            yield f"{name}: shape {list(tensor.shape)}, in the module {list(own.shape)}"
        elif own.numel and casts(own.dtype, "F32") and casts(tensor.dtype, "F32"):
            fp32, stored = _ends(tensor), _ends(own)
            # NaN and infinity are ignored: other checks report values that are not finite.
            with np.errstate(invalid="ignore"):
                if (np.abs(fp32 - stored) > _STEP * np.abs(fp32) + _TINY).any():
                    yield f"{name}: its fp32 values are not those of the module"


def _ends(tensor: Tensor) -> NDArray[Any]:
    """Return the first and the last elements of a tensor as fp32."""
    nbytes = min(tensor.nbytes, _SAMPLE * ITEM_BITS[tensor.dtype] // 8)
    with Reader(tensor.extents) as reader:
        ends = [reader.read(at, nbytes) for at in (0, reader.nbytes - nbytes)]
    return widened(np.concatenate(ends), tensor.dtype)
