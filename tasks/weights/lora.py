"""Pair a PEFT adapter with a model: changes of the tensors in memory, as terms.

    adapter = read_adapter(folder)                        # headers and configuration
    total = changes([(adapter, 1.0)], model)              # terms by live name
    total.findings                                        # everything that does not fit
    require_values([adapter], total.copies)               # reads the data once

The configuration says which modules were trained. Each of them takes its tensors from the adapter's
file; the shapes in the model decide whether they fit. A tensor that nothing takes is a finding.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import Expected, TensorLike, describe
from tasks.core.errors import ArtifactError, ContractError, first_and_more
from tasks.weights.files.dtype_bits import all_zero, is_float, nonfinite
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.index import weight_files
from tasks.weights.files.names import EXPERT, PEFT_PREFIX, without_wrappers
from tasks.weights.files.reader import ADAPTER, read_checkpoint, read_json
from tasks.weights.files.source import Renamed, Source
from tasks.weights.lora_config import AdapterConfig, ends_with, parse_config, targeted_modules
from tasks.weights.mapping import Shape, Slot
from tasks.weights.model import CONV1D, CONVOLUTION, EMBEDDING, LINEAR, OTHER, Model, model_facts
from tasks.weights.model_class import meta_model
from tasks.weights.pickled.tensors import read_state
from tasks.weights.plan import Add, Dora, Dropped, LowRank, Rows, Term

CONFIG = "adapter_config.json"
PICKLED = f"{ADAPTER}.bin"
_FIRST = 3
"""Number of unexpected tensors to name if none of an adapter's tensors is expected."""
_COPIES = re.compile(
    r"\.(original_module|modules_to_save|token_adapter\.(base_layer|trainable_tokens_original))\."
    r"|\.token_adapter\.trainable_tokens_original$"
)
"""Infixes of the copies that peft stores beside the trained tensor of a wrapped embedding."""
_TRAINING = re.compile(r"\.lora_(velora_embed|monteclora_sampler)(\.|$)")
"""Training state of VeLoRA and MonteCLoRA, stored beside a plain pair."""
_NAMED = re.compile(
    r"\.lora_(A|B|embedding_[AB]|magnitude_vector)\.(?!(weight|bias)$)[^.]+(\.weight)?$"
)
"""Keys of a live model, which contain the adapter's name."""


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on disk.

    Attributes:
        root: its folder.
        name: its name in plans; operands of its terms are "<name>:<key>".
        config: its settings.
        tensors: source of its tensors.
        findings: reasons in its configuration why it cannot be merged.
    """

    root: Path
    name: str
    config: AdapterConfig
    tensors: Source
    findings: tuple[str, ...] = ()


def read_adapter(folder: Path, name: str = "adapter", *, beside: Collection[str] = ()) -> Adapter:
    """Open a PEFT folder with `adapter_model.safetensors`, or else `adapter_model.bin`.

    Unsupported settings are in `findings`, so that one error can list them all. `beside` names
    weight files in the folder that are not part of the adapter.

    Raises:
        ArtifactError: the folder has no adapter, or its files cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"{folder}: no {CONFIG}: not a PEFT adapter",
            hint="give the folder that save_pretrained of the PEFT model wrote",
        )
    config, findings = parse_config(read_json(folder / CONFIG))
    patterns = f"{ADAPTER}*.safetensors", f"{ADAPTER}*.safetensors.index.json"
    tensors: Source
    if (folder / PICKLED).is_file() and not weight_files(folder, *patterns):
        state = read_state(folder / PICKLED)
        tensors = Renamed(state, without_wrappers(state.tensors))
    else:
        tensors = read_checkpoint(folder, ADAPTER, beside=beside)
    return Adapter(folder, name, config, tensors, tuple(findings))


@dataclass(frozen=True)
class Changes:
    """Changes of live tensors; a tensor that is not named stays as it is.

    A tensor can have a replacement and terms; the terms then apply to the replacement. If an
    adapter changes only a part of a live tensor (one expert of a stack), the part's key on disk is
    used as the live name, and its terms come after those of the stack.

    Attributes:
        terms: terms by live name, in order; operands are "<adapter>:<key>".
        replacements: "<adapter>:<key>" of the tensor that replaces the base's, by live name.
        shapes: shape by live name of replacements with another number of rows (a vocabulary that
            grew).
        unties: live names that were tied and have to be stored separately from now on;
            config.json then needs `tie_word_embeddings: false`. Without a replacement or terms,
            such a tensor is a copy of the base tensor that it was tied to. A change of any other
            tied tensor applies to all its names and is listed under the stored name.
        dropped: adapter tensors that the merge does not use.
        copies: dropped tensor -> tensor that must have the same bytes.
        findings: everything that is wrong; if not empty, ignore the other attributes.
    """

    terms: Mapping[str, tuple[Term, ...]]
    replacements: Mapping[str, str]
    shapes: Mapping[str, Shape]
    unties: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    copies: Mapping[str, str]
    findings: tuple[str, ...]


def changes(adapters: Sequence[tuple[Adapter, float]], model: Model) -> Changes:
    """Combine adapters with different names, each with its weight; 1.0 merges it as trained.

    The result is `W + sum_i w_i * scale_i * B_i @ A_i`, added in the order given. peft gives the
    same when it merges one adapter after another, each with `set_scale(w)`, and the same up to
    rounding with `add_weighted_adapter(combination_type="cat")`. (Its "linear" sums the factors
    instead, and so multiplies every B with every A.)
    """
    paired = [pair(adapter, weight, model) for adapter, weight in adapters]
    findings = [text for part in paired for text in part.findings]
    if len({adapter.name for adapter, _ in adapters}) < len(adapters):
        findings.append("two adapters have the same name")
    if not adapters:
        findings.append("no adapter to merge")
    untied = {
        name
        for part in paired
        for piece in part.pieces
        if piece.alone
        for name in model.partners(piece.target)
    }
    total = _Sum(model, findings)
    for part in paired:
        earlier = {*total.replacements, *total.terms}
        for piece in part.pieces:
            for name in _stored_names(piece, model, untied):
                if name in earlier and (piece.stored or name in total.replacements):
                    findings.append(f"{name}: replaced by one adapter, changed by another")
                total.add(name, piece, part)
    total.check_rows()
    return Changes(
        terms={name: tuple(terms) for name, terms in total.terms.items()},
        replacements=total.replacements,
        shapes=total.shapes,
        unties=tuple(sorted(untied & set(model.ties))),
        dropped=tuple(entry for part in paired for entry in part.dropped),
        copies=dict(entry for part in paired for entry in part.copies),
        findings=tuple(findings),
    )


@dataclass(frozen=True)
class Piece:
    """The part of an adapter that changes one tensor.

    Attributes:
        target: live name of the tensor; its key on disk if that is a part of a live tensor.
        keys: adapter tensors that it takes.
        term: change of the target; its operands are plain adapter keys. None for a replacement.
        stored: adapter key of the tensor that replaces the target; "" for none.
        alone: True if the target is tied and only this one of its names was trained.
    """

    target: str
    keys: tuple[str, ...]
    term: Term | None = None
    stored: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Paired:
    """An adapter that was paired with a model; `weight` is the factor of its change."""

    adapter: Adapter
    weight: float
    pieces: tuple[Piece, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    findings: tuple[str, ...] = ()


def _stored_names(piece: Piece, model: Model, untied: Collection[str]) -> list[str]:
    """Return the stored tensors that a piece changes; several if they are no longer tied."""
    name = piece.target
    if name not in untied:
        return [model.ties.get(name, name)]
    return [name] if piece.alone else sorted(model.partners(name))


@dataclass
class _Sum:
    """Running sum of the pieces of all adapters."""

    model: Model
    findings: list[str]
    terms: dict[str, list[Term]] = field(default_factory=dict)
    replacements: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def add(self, name: str, piece: Piece, part: Paired) -> None:
        """Add one piece under a name, with operands that name the adapter."""
        adapter, weight = part.adapter, part.weight
        if weight != 1 and (piece.stored or isinstance(piece.term, Rows)):
            self.findings.append(
                f"{name}: is stored as a full tensor, so weight {weight} cannot scale it"
            )
        if piece.stored:
            self.replacements[name] = f"{adapter.name}:{piece.stored}"
            stored = adapter.tensors.tensors.get(piece.stored)
            if stored is not None and tuple(stored.shape) != self._shape(name):
                self.shapes[name] = tuple(stored.shape)
        if piece.term is not None:
            self._add_term(name, _bound(piece.term, adapter.name, weight))

    def _shape(self, name: str) -> Shape:
        of_disk = (slot.shape for slot in self.model.slots if slot.key == name)
        return self.model.parameters.get(name) or next(of_disk)

    def _add_term(self, name: str, term: Term) -> None:
        before = self.terms.setdefault(name, [])
        if before and any(isinstance(earlier, Dora) for earlier in (*before, term)):
            self.findings.append(
                f"{name}: DoRA normalises the weights of the base, so its change cannot be added to"
                " another adapter's, and a merge of one after the other is not their sum: deliver"
                " each of them alone, source=<its folder>, or train one with all the data"
            )
        if isinstance(term, Rows):
            rows = {row for other in before if isinstance(other, Rows) for row in other.indices}
            if twice := rows & set(term.indices):
                self.findings.append(f"{name}: two adapters replace row {min(twice)}")
        before.append(term)

    def check_rows(self) -> None:
        """Check that both embeddings have the same number of rows."""
        rows = {
            shape[0]
            for module in (self.model.input_embedding, self.model.output_embedding)
            for name in self.model.partners(f"{module}.weight")
            if (shape := self.shapes.get(name))
        }
        if len(rows) > 1:
            sizes = " and ".join(map(str, sorted(rows)))
            self.findings.append(f"input and output embedding need equal rows, but have {sizes}")


def _bound(term: Term, adapter: str, weight: float) -> Term:
    """Return the term with operands "<adapter>:<key>" and its scale times the weight."""
    names: dict[str, Any] = {
        operand: f"{adapter}:{getattr(term, operand)}"
        for operand in ("a", "b", "magnitude", "values", "value")
        if hasattr(term, operand)
    }
    if isinstance(term, Rows):
        return replace(term, **names)
    return replace(term, **names, scale=term.scale * weight)


def pair(adapter: Adapter, weight: float, model: Model) -> Paired:
    """Pair the tensors of an adapter with those of the model that it was trained on."""
    where = f"{adapter.root.name}: " if adapter.name != "adapter" else ""
    if adapter.findings:
        texts = tuple(f"{where}adapter_config.json: {finding}" for finding in adapter.findings)
        return Paired(adapter, weight, findings=texts)
    file = adapter.tensors.tensors
    pairing = Pairing(adapter.config, model, file)
    renamed = renamed_keys(model)
    if pairing.unmatched and any(slot.key not in model.parameters for slot in model.slots):
        older = Pairing(adapter.config, by_disk_names(model), file)
        pairing = older if older.unmatched < pairing.unmatched else pairing
    findings = [*pairing.findings, *pairing.misfits()]
    dropped, copies = pairing.leftovers(adapter.name, findings)
    if not math.isfinite(weight) or weight == 0:
        findings.append(f"weight {weight} of the adapter is not a finite number other than 0")
    return Paired(
        adapter,
        weight,
        tuple(replace(x, target=renamed.get(x.target, x.target)) for x in pairing.pieces),
        tuple(dropped),
        tuple(copies),
        tuple(where + finding for finding in findings),
    )


class Pairing:
    """Each module that the configuration names takes its tensors from the adapter's file.

    Attributes:
        pieces: the changes of the model.
        wanted: shape of every tensor that the adapter must contain, by key.
        findings: settings that cannot be merged into this model.
    """

    def __init__(self, config: AdapterConfig, model: Model, file: Mapping[str, TensorLike]) -> None:
        self.config, self.model, self.file = config, model, file
        self.pieces: list[Piece] = []
        self.wanted: dict[str, Shape] = {}
        self.findings: list[str] = []
        modules = targeted_modules(self.config, model.modules, model.output_embedding)
        for module in modules:
            self._take_module(module)
        self._take_parameters()
        saved = self._take_saved()
        self._take_rows()
        self._take_biases(set(modules), saved)
        self._take_embeddings()
        # A wrapped layer may also store its weight as it was.
        ways = [piece for piece in self.pieces if ".base_layer." not in piece.stored]
        for name, count in sorted(Counter(piece.target for piece in ways).items()):
            if count > 1:
                keys = " and ".join(min(p.keys) for p in ways if p.target == name)
                self.findings.append(f"{name}: changed twice, by {keys}")

    @property
    def unmatched(self) -> int:
        """Number of tensors that are missing or unexpected, and of findings."""
        return len(self.findings) + len(set(self.wanted) ^ set(self.file))

    def _take(self, target: str, shapes: Mapping[str, Shape], term: Term, *, alone: bool) -> None:
        self.wanted |= shapes
        self.pieces.append(Piece(target, tuple(shapes), term, alone=alone))

    def _take_full(self, name: str, key: str, *, alone: bool) -> None:
        """Replace a live tensor by a full tensor of the file."""
        self.wanted[key] = self.shape(name) or ()
        alone = alone and self._is_alone(name)
        self.pieces.append(Piece(name, (key,), stored=key, alone=alone))

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a live tensor; of a grown embedding, with the adapter's rows."""
        shape = self.model.parameters.get(name)
        if shape is None:
            return None
        module = name.removesuffix(".weight")
        if module in (self.model.input_embedding, self.model.output_embedding):
            for key in stored_keys(module):
                if key in self.file and len(self.file[key].shape) == 2:
                    return (self.file[key].shape[0], *shape[1:])
        return shape

    def _is_tied(self, name: str) -> bool:
        return len(self.model.partners(name)) > 1

    def _is_alone(self, name: str) -> bool:
        """Return True if a tensor is tied and its names were trained separately."""
        return self._is_tied(name) and not self.config.tying

    def _take_module(self, module: str) -> None:
        """Take the pair on a linear layer or an embedding, and the bias of its B (`lora_bias`)."""
        config, name, kind = self.config, f"{module}.weight", self.model.modules[module]
        shape = self.shape(name)
        if kind not in (LINEAR, CONV1D, EMBEDDING) or shape is None or len(shape) != 2:
            self.findings.append(
                f"{module}: targeted, but a convolution, which cannot be merged here; merge the "
                "adapter with peft's merge_and_unload, or train with it in exclude_modules"
                if kind == CONVOLUTION
                else f"{module}: targeted, but neither a linear layer nor an embedding: it cannot "
                "be merged"
            )
            return
        prefix, rank, scale = PEFT_PREFIX + module, config.rank_of(module), config.scale_of(module)
        turned = kind != LINEAR
        inner, outer = shape if turned else shape[::-1]
        infix, suffix = ("embedding_", "") if kind == EMBEDDING else ("", ".weight")
        a, b = (f"{prefix}.lora_{infix}{half}{suffix}" for half in "AB")
        shapes: dict[str, Shape] = {a: (rank, inner), b: (outer, rank)}
        term: Term = LowRank(a, b, scale, transpose=turned)
        if config.dora:
            if config.tying and self._is_tied(name):
                self.findings.append(
                    f"{module}: DoRA trains separate magnitudes for each use of a tied embedding, "
                    "so they are no longer tied; train without ensure_weight_tying"
                )
            magnitude = f"{prefix}.lora_magnitude_vector"
            shapes[magnitude] = (outer,)
            term = Dora(a, b, magnitude, scale, transpose=turned)
        self._take(name, shapes, term, alone=self._is_alone(name))
        if config.lora_bias and f"{module}.bias" not in self.model.parameters:
            self.findings.append(
                f"{module}: lora_bias needs a layer with a bias, and this one has none; "
                "serve the adapter unmerged with transformers and peft (vLLM does not support "
                "lora_bias), or train without it"
            )
        elif config.lora_bias:
            key = f"{prefix}.lora_B.bias"
            self._take(f"{module}.bias", {key: (outer,)}, Add(key, scale), alone=False)

    def _take_parameters(self) -> None:
        """Take the pairs on single parameters (`target_parameters`).

        peft nests the wrappers of a module's parameters; the first parameter is innermost.
        """
        config, by_module = self.config, dict[str, list[str]]()
        for name in self.model.parameters:
            if ends_with(name, config.target_parameters):
                by_module.setdefault(name.rpartition(".")[0], []).append(name)
        for module, names in by_module.items():
            if config.dora or config.lora_bias:
                self.findings.append(
                    f"{module}: target_parameters supports neither use_dora nor lora_bias"
                )
                continue
            for index, name in enumerate(names):
                prefix = PEFT_PREFIX + module + ".base_layer" * (len(names) - 1 - index)
                self._take_parameter(module, name, prefix)

    def _take_parameter(self, module: str, name: str, prefix: str) -> None:
        a, b = (f"{prefix}.lora_{half}.weight" for half in "AB")
        shape = self.model.parameters[name]
        if len(shape) not in (2, 3):
            self.findings.append(f"{name}: targeted, but neither a matrix nor a stack of them")
            return
        experts = shape[0] if len(shape) == 3 else 1
        rank = self.config.rank_of(name) * experts
        turned = len(shape) == 3 and self._is_turned(module, name, (a, b), rank)
        inner, outer = shape[-2:] if turned else shape[:-3:-1]
        term = LowRank(a, b, self.config.scale_of(name), transpose=turned, experts=experts)
        shapes = {a: (rank, inner), b: (outer, rank)}
        self._take(name, shapes, term, alone=self._is_alone(name))

    def _is_turned(self, module: str, name: str, pair: tuple[str, str], rank: int) -> bool:
        """Return True if A works on the second to last axis of a stack of experts, B on the last.

        peft changed this twice (`ParamWrapper.update_layer`): until 0.18 it is always so; in 0.19.0
        unless the module has `is_transposed`; since 0.19.1 if it has. If the version is not
        recorded, the shapes decide; a square parameter fits both, which is a finding.
        """
        is_transposed = module in self.model.transposed
        match = _VERSION.match(self.config.peft_version)
        if match and not (".dev" in match[4] and match.group(1, 2) in (("0", "18"), ("0", "19"))):
            version = tuple(int(number or 0) for number in match.group(1, 2, 3))
            return version < (0, 19) or is_transposed == (version != (0, 19, 0))
        *_, rows, columns = self.model.parameters[name]
        if rows == columns and not is_transposed:
            recorded = self.config.peft_version or "no version"
            self.findings.append(
                f"{name}: peft 0.18 and 0.19.1 lay out the factors of this square parameter "
                f"differently, and adapter_config.json records {recorded}: write the version of "
                'peft that trained it into adapter_config.json, e.g. "peft_version": "0.19.1"'
            )
        shapes = [tuple(self.file[key].shape) for key in pair if key in self.file]
        older = [(rank, rows), (columns, rank)]
        return is_transposed or (shapes == older and rows != columns)

    def _take_saved(self) -> set[str]:
        """Take every tensor of `modules_to_save`: modules whose name ends with one of its names."""
        model, suffixes = self.model, self.config.modules_to_save
        inside = tuple(f"{name}." for name in model.modules if name.endswith(suffixes))
        names = [name for name in model.parameters if name.startswith(inside)]
        if self.config.tying:  # peft then stores the same tensor under each of its names
            names = [name for name in names if model.ties.get(name) not in names]
        for name in names:
            self._take_full(name, PEFT_PREFIX + name, alone=True)
        return set(names)

    def _take_rows(self) -> None:
        """Take the rows of embeddings that `trainable_token_indices` trained."""
        config, model = self.config, self.model
        rows_of: dict[str, tuple[int, ...]] = {}
        for suffix, rows in config.token_indices.items():
            for module in model.modules if suffix else [model.input_embedding]:
                if module and module.endswith(suffix):
                    rows_of[module] = rows
        if config.token_indices and not rows_of:
            self.findings.append(
                f"trainable_token_indices: the model has no {sorted(config.token_indices)}"
            )
        embedding = rows_of.get(model.input_embedding)
        together = all(rows == embedding for rows in rows_of.values()) or config.tying
        for module, indices in rows_of.items():
            name = f"{module}.weight"
            shape = self.shape(name)
            if shape is None:
                self.findings.append(
                    f"{module}: named in trainable_token_indices, but not an embedding"
                )
                continue
            tied = f"{model.input_embedding}.weight" in model.partners(name)
            if tied and module != model.input_embedding and indices == embedding:
                continue  # the rows of a tied tensor are stored once, with the input embedding
            outside = [row for row in indices if row >= shape[0]]
            if outside:
                self.findings.append(
                    f"{module}: trained token {outside[0]} is outside its {shape[0]} rows"
                )
            key = f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta"
            alone = self._is_tied(name) and not together
            self._take(name, {key: (len(indices), *shape[1:2])}, Rows(key, indices), alone=alone)

    def _take_biases(self, modules: Collection[str], saved: Collection[str]) -> None:
        """Take every bias that was trained itself (`bias` "all" or "lora_only")."""
        for name in self.model.parameters if self.config.bias != "none" else ():
            module = name.removesuffix(".bias")
            if module == name or name in saved:
                continue
            if module in modules:
                self._take_full(name, f"{PEFT_PREFIX}{module}.base_layer.bias", alone=False)
            elif self.config.bias == "all":
                self._take_full(name, PEFT_PREFIX + name, alone=False)

    def _take_embeddings(self) -> None:
        """Take the full embeddings that peft stored without `modules_to_save`.

        peft does so if the vocabulary grew, or if the embedding is a target.
        """
        model, seen = self.model, set[str]()
        modules = (model.input_embedding, model.output_embedding)
        known = {piece.stored for piece in self.pieces}
        trained = {module for module in modules if known & set(stored_keys(module))}
        shared = {name for module in trained for name in model.partners(f"{module}.weight")}
        for module in modules:
            name = f"{module}.weight"
            keys = [key for key in stored_keys(module) if key in self.file]
            if name not in model.parameters or not keys or module in trained:
                continue
            if name in shared:  # tied to a trained module: a copy, or its value before training
                if not self.config.tying:
                    self._take_full(name, keys[0], alone=True)
            elif not seen & model.partners(name):  # the copy under another tied name is the same
                self._take_full(name, keys[0], alone=False)
            seen |= model.partners(name)

    def misfits(self) -> Iterator[str]:
        """Yield tensors that are missing or of another shape."""
        wanted, file = self.wanted, self.file
        present = [key for key in wanted if key in file]
        if not file:
            yield "the adapter holds no tensors"
        elif not wanted:
            yield "the adapter matches nothing: the model has none of its target modules"
        elif not present:
            yield (
                "the adapter matches nothing: it has none of the tensors that its configuration "
                f"needs; they are {next(iter(wanted))} and {len(wanted) - 1} more, and it has "
                f"{min(file)} and {len(file) - 1} more"
            )
        else:
            if len(present) < len(wanted):
                yield f"the adapter has only {len(present)} of the {len(wanted)} tensors it needs"
            for key, shape in wanted.items():
                if text := self._misfit(key, shape):
                    yield f"{key}: {text}"

    def _misfit(self, key: str, shape: Shape) -> str:
        tensor = self.file.get(key)
        if tensor is None:
            return "missing"
        if 0 in tensor.shape or not tensor.shape:
            return (
                f"has shape {list(tensor.shape)}: it was saved under ZeRO-3 or FSDP without "
                "gathering it first"
            )
        if tuple(tensor.shape) != shape:
            return f"is {list(tensor.shape)}, the model and the rank need {list(shape)}"
        if not is_float(tensor.dtype):
            return f"{describe(tensor.shape, tensor.dtype)} is not a float tensor"
        return ""

    def leftovers(
        self, name: str, findings: list[str]
    ) -> tuple[list[Dropped], list[tuple[str, str]]]:
        """Drop known copies with a reason; any other tensor that nothing takes is a finding.

        Returns the dropped tensors of the adapter `name`, and pairs (dropped, tensor with the same
        bytes).
        """
        dropped: list[Dropped] = []
        copies: list[tuple[str, str]] = []

        def unexpected() -> Iterator[str]:
            absent = sorted(set(self.wanted) - set(self.file))
            for key in sorted(set(self.file) - set(self.wanted)):
                reason, original = self._copy(key)
                if reason:
                    dropped.append(Dropped(f"{name}:{key}", reason))
                    if original:
                        copies.append((f"{name}:{key}", f"{name}:{original}"))
                    continue
                hint = self._hint(key, absent)
                absent = []  # a search for a near match is slow, and one hint is enough
                yield f"{key}: unexpected" + (f": {hint}" if hint else "")

        fits = not self.file.keys().isdisjoint(self.wanted)
        findings += unexpected() if fits else islice(unexpected(), _FIRST)
        return dropped, copies

    def _copy(self, key: str) -> tuple[str, str]:
        """Return why a tensor may be left out ("" if it may not), and the tensor that it repeats.

        The second is "" if the bytes do not matter.
        """
        if _TRAINING.search(key):
            return "training state, which a merged model does not need", ""
        plain = _COPIES.sub(".", key)
        if plain != key and (plain in self.wanted or key.endswith("trainable_tokens_original")):
            original = plain if ".modules_to_save." in key else ""
            return "a copy that peft keeps beside the trained tensor", original
        for alias, holder in self.model.ties.items():
            partners = self.model.partners(alias)
            for piece in self.pieces:
                if piece.target in partners and not piece.alone:
                    tied = _tied_keys(alias, piece)
                    if key in tied or plain in tied:
                        original = "" if ".original_module." in key else piece.stored
                        return f"tied to {holder}, which is stored too", original
        return "", ""

    def _hint(self, key: str, absent: Sequence[str]) -> str:
        """Return a hint on a key that no piece uses; "" for none."""
        if not key.startswith(PEFT_PREFIX):
            return f"keys of an adapter start with {PEFT_PREFIX}"
        if _NAMED.search(key):
            return (
                "it contains an adapter's name: save it with save_pretrained, which removes the "
                "name"
            )
        names = (*self.model.parameters, *(slot.key for slot in self.model.slots))
        if EXPERT.search(key) and not any(map(EXPERT.search, names)):
            return (
                "the adapter has separate experts, as in transformers 4, and the base stores them "
                "fused: use a base that stores them separately, as published ones do; or load the "
                "adapter with the current peft and save it again (not with rsLoRA: its scale "
                "changes)"
            )
        close = difflib.get_close_matches(key, absent, n=1)
        return f"near: {close[0]}" if close else ""


_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(.*)")


def stored_keys(module: str) -> tuple[str, ...]:
    """Return the keys under which peft may store a full embedding."""
    infixes = ("", "base_layer.", "token_adapter.base_layer.")
    return tuple(f"{PEFT_PREFIX}{module}.{infix}weight" for infix in infixes)


def _tied_keys(name: str, piece: Piece) -> tuple[str, ...]:
    """Return the keys under which peft stores a piece again, for another name of a tied tensor."""
    module = name.removesuffix(".weight")
    if piece.stored:
        return stored_keys(module)
    if isinstance(piece.term, Rows):
        return (f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta",)
    return tuple(f"{PEFT_PREFIX}{module}.lora_{half}.weight" for half in "AB")


def renamed_keys(model: Model) -> dict[str, str]:
    """Return the live name by key on disk, of tensors that differ by nothing but the name."""
    live = {slot.live for slot in model.slots}
    counts = Counter(slot.key for slot in model.slots)
    return {
        slot.key: slot.live
        for slot in model.slots
        if slot.key not in live and slot.is_renamed and counts[slot.key] == 1
    }


def by_disk_names(model: Model) -> Model:
    """Describe the model by the names of its checkpoint, with every matrix as a linear layer.

    transformers 5 fuses the experts of a layer into one tensor while it loads. transformers 4 had
    one linear layer per expert, under the names that checkpoints still have, and so do its
    adapters. peft 0.21 gives the same result when it loads such an adapter, except with rsLoRA: it
    doubles rank and alpha of a fused pair, which keeps alpha / rank but makes alpha / sqrt(rank)
    too large by sqrt(2).
    """
    names = {live: key for key, live in renamed_keys(model).items()}
    live = {slot.live for slot in model.slots}
    parts: list[Slot] = [x for x in model.slots if x.key not in live and x.live not in names]
    fused = {slot.live for slot in parts}
    kept = {names.get(name, name): name for name in model.parameters if name not in fused}
    parameters = {name: model.parameters[now] for name, now in kept.items()}
    parameters |= {slot.key: slot.shape for slot in parts}
    modules: dict[str, str] = {}
    for name, shape in parameters.items():
        module = name.rpartition(".")[0]
        parents = module.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            modules.setdefault(".".join(parents[:depth]), OTHER)
        kind = model.modules.get(kept.get(name, "").rpartition(".")[0], OTHER)
        if kind == OTHER and name.endswith(".weight") and len(shape) == 2:
            kind = LINEAR
        if modules.get(module, OTHER) == OTHER:
            modules[module] = kind

    def renamed(module: str) -> str:
        return names.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")

    return Model(
        parameters,
        modules,
        ties={names.get(alias, alias): names.get(to, to) for alias, to in model.ties.items()},
        transposed=frozenset(
            name.rpartition(".")[0]
            for name, now in kept.items()
            if now.rpartition(".")[0] in model.transposed
        ),
        input_embedding=renamed(model.input_embedding),
        output_embedding=renamed(model.output_embedding),
    )


def adapter_contract(base: Path, adapter_config: Path, dtype: str = "BF16") -> list[Expected]:
    """Return the tensors that `adapter_model.safetensors` has to contain.

    Settings that this project cannot merge are left to peft, which wraps a model on the meta
    device: an adapter that cannot be merged can still be gathered.

    Raises:
        ArtifactError: the configuration cannot be read, or does not fit the base.
    """
    # Initialisers such as PiSSA compute with base weights, which the meta device does not have.
    settings = {**read_json(adapter_config), "init_lora_weights": False, "inference_mode": False}
    ours, findings = parse_config(settings)
    if not findings:
        pairing = Pairing(ours, model_facts(base), {})
        if pairing.wanted and not pairing.findings:
            return [Expected(key, shape, dtype) for key, shape in pairing.wanted.items()]
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    try:
        config = LoraConfig(**{k: v for k, v in settings.items() if k != "peft_type"})
        with torch.device("meta"):
            wrapped = get_peft_model(meta_model(base, "bfloat16"), config)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{adapter_config}: does not fit {base}: {error}") from error
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return [Expected(name, tuple(tensor.shape), dtype) for name, tensor in state.items()]


# Numbers of an adapter, before anything is written.

_BLOCK = 4 << 20
_FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?$")


def require_values(adapters: Sequence[Adapter], copies: Mapping[str, str] | None = None) -> None:
    """Check the numbers of all adapters, and that dropped copies equal their originals.

    Args:
        adapters: the adapters that are merged.
        copies: `Changes.copies`: dropped tensor -> tensor that must have the same bytes.

    Raises:
        ContractError: lists every finding.
    """
    findings = [
        f"{adapter.root.name}: {text}" for adapter in adapters for text in value_findings(adapter)
    ]
    by_name = {adapter.name: adapter for adapter in adapters}
    for copy, original in (copies or {}).items():
        name, _, key = copy.partition(":")
        of = original.partition(":")[2]
        if not _same(by_name[name], key, of):
            findings.append(
                f"{by_name[name].root.name}: {key}: differs from {of}, of which it must be a copy"
            )
    if findings:
        raise ContractError(f"adapter: {first_and_more(findings)}", details=findings)


def value_findings(adapter: Adapter) -> Iterator[str]:
    """Yield the tensors with NaN or infinity, magnitudes of zeros, and an adapter without effect.

    A pair with an all-zero A or B changes nothing. Some may: a module that saw no data stays as it
    was initialised. If all do, the adapter was not trained, or not saved from the trained model.
    """
    pairs: set[str] = set()
    zeros: set[str] = set()
    for key, info in sorted(adapter.tensors.tensors.items()):
        bad, zero = 0, True
        for raw in _blocks(adapter, key):
            bad += nonfinite(raw, info.dtype)
            zero = zero and all_zero(raw, info.dtype)
        if bad:
            yield f"{key}: {bad} elements are NaN or infinite"
        if (factor := _FACTOR.search(key)) is None:
            continue
        if factor[1] != "magnitude_vector":
            pairs.add(key[: factor.start()])
            zeros |= {key[: factor.start()]} if zero else set()
        elif zero:
            yield f"{key}: all zero: not saved from the trained model"
    if pairs and pairs == zeros:
        yield (
            f"all {len(pairs)} LoRA pairs have a factor that is all zero: the adapter was not "
            "trained, or not saved from the trained model"
        )


def _same(adapter: Adapter, key: str, of: str) -> bool:
    copy, original = adapter.tensors.tensors[key], adapter.tensors.tensors[of]
    if (tuple(copy.shape), copy.dtype) != (tuple(original.shape), original.dtype):
        return False
    pairs = zip(_blocks(adapter, key), _blocks(adapter, of), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _blocks(adapter: Adapter, key: str) -> Iterator[NDArray[np.uint8]]:
    """Yield a tensor's bytes in blocks; each block is valid until the next one is read."""
    with Reader(adapter.tensors.extents(key)) as stream:
        buffer: NDArray[np.uint8] = np.empty(min(_BLOCK, stream.nbytes), np.uint8)
        for at in range(0, stream.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, stream.nbytes - at)]
            stream.into(memoryview(block), at)
            yield block
