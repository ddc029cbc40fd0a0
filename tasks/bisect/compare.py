"""Compare two loaded models module by module, and judge the differences.

Names are those of the plain model: wrappers and adapters leave no trace in them. A layer with an
unmerged adapter is one module, whose weight is the base's plus the adapter's change.

A difference in layer k changes the input of every later layer, and rounding noise grows from layer
to layer. So two models are not compared by their hidden states. In a replay each module gets the
recorded input in place of the one that arrives, and passes on the recorded output in place of its
own. Two distances are measured at each module:

    input    from the arriving input to the recorded one: the code between modules (attention,
             rotary embedding, residual sums), which started from recorded outputs
    output   from the module's output to the recorded one, both for the recorded input

Neither depends on any other module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from tasks.bisect.report import Divergence, TensorGap
from tasks.bisect.tensors import cause_of, compare
from tasks.serving.reference.load import input_device
from tasks.serving.reference.measure import other_sums
from tasks.weights.files.names import PEFT_PREFIX, unwrap

Weights = dict[str, torch.Tensor]


def places(model: Any) -> dict[str, Any]:
    """Return the modules to compare by name: those with weights of their own, and the smallest."""
    listed: dict[str, Any] = {}
    _collect(model, "", listed)
    return listed


def _collect(module: Any, name: str, listed: dict[str, Any]) -> None:
    children = [] if _is_adapted(module) else list(module.named_children())
    own = next(module.parameters(recurse=False), None) is not None
    if own or not children:
        listed[unwrap(name.removeprefix(PEFT_PREFIX))] = module
    for child, below in children:
        _collect(below, f"{name}.{child}" if name else child, listed)


def _is_adapted(module: Any) -> bool:
    """Return True for a layer that peft has wrapped."""
    # Not by hasattr: peft's model as a whole passes attributes on, and has modules_to_save too.
    return bool({"base_layer", "modules_to_save"} & module._modules.keys())


def weights_of(module: Any) -> Weights:
    """Return the weights that a module computes with, by name.

    Tensors of a quantised layer whose values cannot be read are left out.
    """
    if hasattr(module, "modules_to_save"):
        active = module.active_adapters[0]
        chosen = module.modules_to_save
        return weights_of(chosen[active] if active in list(chosen) else module.original_module)
    if hasattr(module, "base_layer"):
        return _adapted(module)
    listed = {name: _readable(tensor) for name, tensor in module.named_parameters(recurse=False)}
    temporary = module._non_persistent_buffers_set
    for name, tensor in module.named_buffers(recurse=False):
        if name not in temporary:
            listed[name] = tensor
    scale = listed.pop("weight_scale", None)
    listed.pop("input_scale", None)
    weight = listed.get("weight")
    if scale is not None and weight is not None:  # float8 or int8 of compressed-tensors
        listed["weight"] = weight.float() * scale.float()
    return {
        name: tensor
        for name, tensor in listed.items()
        if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool)
    }


def _readable(parameter: Any) -> Any:
    """Return a parameter's values; a 4-bit one of bitsandbytes dequantised; else None if packed."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


@torch.no_grad()
def _adapted(module: Any) -> Weights:
    """Return the weights of a layer with LoRA factors: base and change added in float32."""
    listed = weights_of(module.base_layer)
    change = getattr(module, "get_delta_weight", None)
    if change is None or getattr(module, "disable_adapters", False):
        return listed
    key = getattr(module, "parameter_name", "weight")  # of a layer that has several, as experts
    stored = {each: each.data for name, each in module.named_parameters() if "lora_" in name}
    try:
        for factor, data in stored.items():
            factor.data = data.float()  # peft rounds the change to the factors' dtype
        for adapter in module.active_adapters:
            factors = [*getattr(module, "lora_A", ()), *getattr(module, "lora_embedding_A", ())]
            if key in listed and adapter in factors:
                listed[key] = listed[key].float() + change(adapter).float()
    finally:
        for factor, data in stored.items():
            factor.data = data
    return listed


Part = Literal["input", "output"]
SMALLEST_ROW = 1e-2
"""Rows of less than this share of the usual length are compared as if they had it: a row of almost
zeros has no meaningful relative distance."""


@dataclass(frozen=True)
class Call:
    """Tensors among a module's arguments, and those that it returned, in order."""

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


Recording = dict[str, list[Call]]
"""Calls of each module on one probe, in the order of the first calls."""


@dataclass
class Distance:
    """Distance of two sets of rows; a row is one position's vector."""

    squares: float = 0.0  # sum of the squared relative distances of all rows
    rows: int = 0
    largest: float = 0.0  # relative distance of a row
    # differences that are no distance: shapes, numbers of calls, not finite
    strange: set[str] = field(default_factory=set)
    least: float = 0.0  # of the mean

    @property
    def mean(self) -> float:
        """Root of the mean squared relative distance of the rows."""
        mean = float((self.squares / self.rows) ** 0.5) if self.rows else 0.0
        return max(mean, self.least)

    def add(self, new: torch.Tensor, recorded: torch.Tensor) -> bool:
        """Add the rows of a tensor. Returns False if the two have different shapes."""
        recorded = recorded.to(new.device)
        if new.numel() != recorded.numel() or new.shape[-1:] != recorded.shape[-1:]:
            self.strange.add(f"shape {list(new.shape)}, not {list(recorded.shape)}")
            return False
        if new.numel() == 0:
            return True
        new, recorded = _rows(new.detach()), _rows(recorded.detach())
        if not new.is_floating_point():
            self.largest = max(self.largest, float((new != recorded).any()))
            return True
        new, recorded = new.float(), recorded.float()
        same = (new == recorded) | (new.isnan() & recorded.isnan())  # infinities of masks
        apart = torch.where(same, 0.0, new - recorded).norm(dim=-1)
        lengths = recorded.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
        usual = lengths.square().mean().sqrt().item()
        relative = apart / lengths.clamp_min(max(SMALLEST_ROW * usual, 1e-30))
        if not relative.isfinite().all():
            self.strange.add("NaN or infinite")
            return True
        self.squares += float(relative.square().sum())
        self.rows += relative.numel()
        self.largest = max(self.largest, float(relative.max()))
        return True


Distances = dict[tuple[str, Part], Distance]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


def record(model: Any, places: Mapping[str, Any], ids: torch.Tensor) -> Recording:
    """Run a model on one probe, ids of shape (1, T), and record the calls of its modules."""
    recording: Recording = {}
    open_calls: dict[str, list[list[torch.Tensor]]] = defaultdict(list)

    def before(name: str, args: Any) -> None:
        recording.setdefault(name, [])
        open_calls[name].append([tensor.detach().clone() for tensor in _tensors(args)])

    def after(name: str, output: Any) -> None:
        outputs = [tensor.detach().clone() for tensor in _tensors(output)]
        recording[name].append(Call(open_calls[name].pop(), outputs))

    with _hooked(places, before, after):
        _run(model, ids)
    return recording


def replay(
    model: Any,
    places: Mapping[str, Any],
    ids: torch.Tensor,
    recording: Recording,
    distances: Distances,
    *,
    nudge: float = 0.0,
) -> None:
    """Run a model on one probe with recorded inputs and outputs, and add up the distances.

    `nudge` is the relative size of random changes of all values that are passed on: the distances
    are then this model's own noise.
    """
    generator = torch.Generator().manual_seed(0)
    counts: dict[str, int] = defaultdict(int)
    running: dict[str, list[Call | None]] = defaultdict(list)

    def forced(name: str, part: Part, tree: Any, recorded: Sequence[torch.Tensor]) -> Any:
        leaves, spec = pytree.tree_flatten(tree)
        distance = distances.setdefault((name, part), Distance())
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len(at) != len(recorded):
            distance.strange.add(f"{len(at)} tensors, not {len(recorded)}")
            return tree
        for n, kept in zip(at, recorded, strict=True):
            new = leaves[n]
            if distance.add(new, kept):
                value = kept.reshape(new.shape).to(new.device, new.dtype)
                leaves[n] = _nudged(value, nudge, generator) if nudge else value
        return pytree.tree_unflatten(leaves, spec)

    def before(name: str, args: Any) -> Any:
        calls, number = recording.get(name, []), counts[name]
        counts[name] += 1
        call = calls[number] if number < len(calls) else None
        running[name].append(call)
        if call is None:
            strange = distances.setdefault((name, "input"), Distance()).strange
            strange.add(f"is called, and was called {len(calls)} times")
            return args
        return forced(name, "input", args, call.inputs)

    def after(name: str, output: Any) -> Any:
        call = running[name].pop()
        return output if call is None else forced(name, "output", output, call.outputs)

    with _hooked(places, before, after):
        _run(model, ids)
    for name, calls in recording.items():
        if counts[name] < len(calls):
            strange = distances.setdefault((name, "input"), Distance()).strange
            strange.add(f"is called {counts[name]} times, and was called {len(calls)} times")


def read_calls(path: Path, count: int) -> list[Recording]:
    """Read the recordings that another engine wrote (`tasks/serving/vllm/module_calls.py`)."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    recordings: list[Recording] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        number, name, part = key.split("/")
        if part == "in":
            call = Call([tensor], [tensors[f"{number}/{name}/out"]])
            recordings[int(number)][name] = [call]
    return recordings


def _nudged(value: torch.Tensor, size: float, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return (value.float() * (1 + size * signs.to(value.device))).to(value.dtype)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


@torch.no_grad()
def _run(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, use_cache=False)


@contextmanager
def _hooked(places: Mapping[str, Any], before: Any, after: Any) -> Iterator[None]:
    """Call `before(name, (args, kwargs))` and `after(name, output)` around each module.

    A value that they return replaces the arguments or the output.
    """
    handles = []
    for name, module in places.items():

        def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> Any:
            return before(name, (args, kwargs))

        def leave(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> Any:
            return after(name, output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


FACTOR = 4.0
"""Distances above this many times the noise are differences."""
EXPLAINED = 16
"""Differing modules whose cause is looked for."""
OTHERS = 1 << 30
"""Numbers of a's other tensors in which b's values are looked for."""


@dataclass(frozen=True)
class Compared:
    """Comparison of two models."""

    order: list[str]  # names of all modules, in the order of execution
    divergences: list[Divergence]  # in that order
    gaps: Mapping[str, list[TensorGap]]  # comparisons of all weights, by module
    exact: bool  # all outputs are equal bit for bit

    @property
    def roundings(self) -> set[str]:
        """Formats that explain differences of weights."""
        return {gap.rounding for gaps in self.gaps.values() for gap in gaps} - {""}


class Pair:
    """Two loaded models of transformers, in eval mode, and their modules.

    `quantised` says that one of the two declares quantised weights.
    """

    def __init__(self, a: Any, b: Any, quantised: bool = False) -> None:
        self.a, self.b, self.quantised = a, b, quantised
        self.in_a, self.in_b = places(a), places(b)
        self._called: list[str] = []
        self._distances: Distances = {}
        self._noise: Distances = {}  # a's own, in the coarser dtype

    @property
    def missing(self) -> list[str]:
        """Names of the modules that only one of the two has."""
        only_a = [f"{name}: only in a" for name in self.in_a if name not in self.in_b]
        return only_a + [f"{name}: only in b" for name in self.in_b if name not in self.in_a]

    def compare(
        self, probes: Sequence[Sequence[int]], recordings: Sequence[Recording] | None = None
    ) -> Compared:
        """Compare the models on some probes.

        Recordings of another engine that runs b are replayed in a, in place of a's calls in b.
        """
        gaps = {name: list(self._weight_gaps(name)) for name in self.in_a if name in self.in_b}
        self._measure(probes, recordings)
        order = list(dict.fromkeys([*self._called, *self.in_a]))
        differing = tuple(
            f"{name}." for name, each in gaps.items() if any(gap.different for gap in each)
        )
        rows = [
            row
            for name in order
            # Inside a module whose own weights differ, as an expert's activation, nothing is new.
            if not name.startswith(differing)
            for row in self._divergences(name, gaps.get(name, []))
        ]
        rows = [self._explained(row) for row in rows[:EXPLAINED]] + rows[EXPLAINED:]
        exact = all(not d.largest and not d.strange for d in self._distances.values())
        return Compared(order, rows, gaps, exact)

    def _weight_gaps(self, name: str) -> Iterator[TensorGap]:
        a, b = weights_of(self.in_a[name]), weights_of(self.in_b[name])
        for key in a.keys() & b.keys():
            yield compare(f"{name}.{key}", a[key], b[key])
        if not self.quantised:
            for key in a.keys() ^ b.keys():
                side = "a" if key in a else "b"
                shape = tuple((a if key in a else b)[key].shape)
                yield TensorGap(f"{name}.{key}", shape, problem=f"only in {side}")

    def _measure(
        self, probes: Sequence[Sequence[int]], recordings: Sequence[Recording] | None
    ) -> None:
        """Add up the distances by module and part, and those of a from itself, nudged."""
        nudge = max(torch.finfo(model.dtype).eps for model in (self.a, self.b))
        for number, probe in enumerate(probes):
            in_a, in_b = (
                torch.tensor([[*probe]], device=input_device(m)) for m in (self.a, self.b)
            )
            own = record(self.a, self.in_a, in_a)
            self._called = list(dict.fromkeys([*self._called, *own]))
            if recordings is None:
                shared = {name: calls for name, calls in own.items() if name in self.in_b}
                here = {name: m for name, m in self.in_b.items() if name in self.in_a}
                replay(self.b, here, in_b, shared, self._distances)
            else:
                there = {name: m for name, m in self.in_a.items() if name in recordings[number]}
                replay(self.a, there, in_a, recordings[number], self._distances)
            with other_sums(self.a):
                replay(self.a, self.in_a, in_a, own, self._noise, nudge=nudge)
        for each in self._noise.values():
            each.least = nudge / 2

    def _divergences(self, name: str, gaps: Sequence[TensorGap]) -> Iterator[Divergence]:
        """Yield what is beyond noise: the code before a module; its weights, or its output."""
        if self._is_beyond(name, "input"):
            yield self._divergence(name, "input")
        different = [gap for gap in gaps if gap.different]
        if different:
            yield self._divergence(name, "weights", different)
        elif self._is_beyond(name, "output", max([0.0, *(gap.relative for gap in gaps)])):
            yield self._divergence(name, "output")

    def _is_beyond(self, name: str, part: Part, explained: float = 0.0) -> bool:
        """Return True if a distance is beyond noise, and beyond what rounded weights explain."""
        here, noise = self._distances.get((name, part)), self._noise.get((name, part))
        if here is None or noise is None:
            return False
        if here.strange:
            return not noise.strange
        usual = self._usual.get((_kind(name), part), 0.0)
        ratio = max(
            here.mean / max(noise.mean, explained, usual),
            here.largest / max(noise.largest, noise.least * 2, explained * 2, usual * 4),
        )
        return ratio > FACTOR

    @cached_property
    def _usual(self) -> dict[tuple[str, Part], float]:
        """The usual distance of modules of a kind, over all layers, of quantised models."""
        listed: dict[tuple[str, Part], list[float]] = defaultdict(list)
        for (name, part), distance in self._distances.items():
            listed[_kind(name), part].append(distance.mean)
        if not self.quantised:
            return {}
        return {key: median(values) for key, values in listed.items() if len(values) > 2}

    def _divergence(self, name: str, where: str, gaps: Sequence[TensorGap] = ()) -> Divergence:
        part: Part = "input" if where == "input" else "output"
        here = self._distances.get((name, part), Distance())
        noise = self._noise.get((name, part), Distance()).mean
        cause = "; ".join(sorted(here.strange))
        return Divergence(name, where, here.mean or here.largest, noise, list(gaps), cause)

    def _explained(self, row: Divergence) -> Divergence:
        """Return the divergence with its cause, if its weights differ."""
        if row.where != "weights":
            return row
        a, b = weights_of(self.in_a[row.module]), weights_of(self.in_b[row.module])
        gap = row.tensors[0]
        key = gap.name.removeprefix(f"{row.module}.")
        cause, hint = cause_of(gap, a.get(key), b.get(key), self._others(gap))
        return replace(row, cause=cause, hint=hint)

    def _others(self, gap: TensorGap) -> Weights:
        """Return a's other tensors of the same shape, for a look at mixed-up names."""
        listed: Weights = {}
        room = OTHERS if len(gap.shape) > 1 else 0  # vectors of norms are too much alike
        for name, place in self.in_a.items():
            for own, tensor in place.named_parameters(name, recurse=False):
                same = tensor.shape == gap.shape and own != gap.name
                room -= tensor.numel() if same else 0
                if room > 0 and same:
                    listed[own] = tensor.detach()
        return listed


def _kind(name: str) -> str:
    """Return a module's name without the numbers of layers and experts."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))
