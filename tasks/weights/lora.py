"""Open a PEFT adapter, and turn it into changes of a model's tensors in memory, as terms.

    adapter = read_adapter(folder)               # headers and configuration
    total = changes(adapter, model)              # terms by live name
    total.findings                               # everything that does not fit
    require_values(adapter, total.copies)        # reads the data once

Pairing follows peft's rules: the configuration says which modules were trained. Each of them takes
its tensors from the file; the shapes in the model decide whether they fit. A tensor that nothing
takes is a problem, unless peft is known to keep it beside the trained one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import Expected, describe
from tasks.core.errors import ArtifactError, ContractError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import all_zero, is_float, nonfinite
from tasks.weights.files.names import PEFT_PREFIX, without_wrappers
from tasks.weights.files.reader import ADAPTER, read_checkpoint, weight_files
from tasks.weights.files.tensors import Reader, Tensor, Tensors
from tasks.weights.lora_config import AdapterConfig, ends_with, parse_config, targeted_modules
from tasks.weights.mapping import Shape, Slot
from tasks.weights.model import CONV1D, EMBEDDING, LINEAR, OTHER, Model, model_facts
from tasks.weights.pickled.torch_file import read_state
from tasks.weights.plan import LowRank, Rows, Term

CONFIG = "adapter_config.json"
PICKLED = f"{ADAPTER}.bin"


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on disk."""

    root: Path
    config: AdapterConfig
    tensors: Tensors
    findings: tuple[str, ...] = ()  # reasons in its configuration why it cannot be merged


def read_adapter(folder: Path, *, beside: Collection[str] = ()) -> Adapter:
    """Open a PEFT folder with `adapter_model.safetensors`, or else `adapter_model.bin`.

    Unsupported settings are in `findings`, so that one error can list them all. `beside` names
    weight files in the folder that are not part of the adapter.
    """
    if not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"{folder}: no {CONFIG}: not a PEFT adapter",
            hint="give the folder that save_pretrained of the PEFT model wrote",
        )
    config, findings = parse_config(read_json(folder / CONFIG))
    patterns = f"{ADAPTER}*.safetensors", f"{ADAPTER}*.safetensors.index.json"
    tensors: Tensors
    if (folder / PICKLED).is_file() and not weight_files(folder, *patterns):
        state = read_state(folder / PICKLED)
        tensors = {key: state[name] for key, name in without_wrappers(state).items()}
    else:
        tensors = read_checkpoint(folder, ADAPTER, beside=beside)
    return Adapter(folder, config, tensors, tuple(findings))


# Pairs, by peft's rules.

INPUT = "adapter"
"""Name of an adapter among the inputs of a plan."""
_FIRST = 3
"""Number of unexpected tensors to name if none of an adapter's tensors is expected."""
_COPIES = re.compile(
    r"\.(original_module|modules_to_save|token_adapter\.(base_layer|trainable_tokens_original))\."
    r"|\.token_adapter\.trainable_tokens_original$"
)
"""Infixes of the copies that peft stores beside the trained tensor of a wrapped embedding."""
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?!\.dev)")


@dataclass(frozen=True)
class Piece:
    """The part of an adapter that changes one tensor: a term, or a tensor that replaces it."""

    target: str  # live name of the tensor; its key on disk if that is a part of a live tensor
    term: Term | None = None
    stored: str = ""  # adapter key of the tensor that replaces the target
    alone: bool = False  # the target is tied and only this one of its names was trained


class Pairing:
    """Each module that the configuration names takes its tensors from the adapter's file.

    Attributes:
        pieces: the changes of the model.
        wanted: shape of every tensor that the adapter must contain, by key.
        findings: settings that cannot be merged into this model.
    """

    def __init__(self, config: AdapterConfig, model: Model, file: Tensors) -> None:
        self.config, self.model, self.file = config, model, file
        self.pieces: list[Piece] = []
        self.wanted: dict[str, Shape] = {}
        self.findings: list[str] = []
        modules = targeted_modules(config, model.modules, model.output_embedding)
        for module in modules:
            self._take_module(module)
        self._take_parameters()
        saved = self._take_saved()
        self._take_rows()
        self._take_biases(set(modules), saved)
        self._take_embeddings()
        # A wrapped layer may also store its weight as it was.
        counts = Counter(x.target for x in self.pieces if ".base_layer." not in x.stored)
        self.findings += [f"{name}: changed twice" for name in sorted(counts) if counts[name] > 1]

    @property
    def unmatched(self) -> int:
        """Number of tensors that are missing or unexpected, and of findings."""
        return len(self.findings) + len(set(self.wanted) ^ set(self.file))

    def _take(self, target: str, shapes: Mapping[str, Shape], term: Term, *, alone: bool) -> None:
        self.wanted |= shapes
        self.pieces.append(Piece(target, term, alone=alone and not self.config.ensure_weight_tying))

    def _take_full(self, name: str, key: str, *, alone: bool) -> None:
        """Replace a live tensor by a full tensor of the file."""
        self.wanted[key] = self.shape(name) or ()
        alone = alone and self._is_tied(name) and not self.config.ensure_weight_tying
        self.pieces.append(Piece(name, stored=key, alone=alone))

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a live tensor; of a grown embedding, with the adapter's rows."""
        shape = self.model.parameters.get(name)
        module, _, part = name.rpartition(".")
        if shape and module in (self.model.input_embedding, self.model.output_embedding):
            for key in _stored_keys(module, part):
                if key in self.file and len(self.file[key].shape) == len(shape):
                    return (self.file[key].shape[0], *shape[1:])
        return shape

    def _is_tied(self, name: str) -> bool:
        return len(self.model.partners(name)) > 1

    def _take_module(self, module: str) -> None:
        """Take the pair on a linear layer or an embedding."""
        config, name, kind = self.config, f"{module}.weight", self.model.modules[module]
        shape, is_tied = self.shape(name), self._is_tied(name)
        way_out = "merge it with peft's merge_and_unload, or train with it in exclude_modules"
        if kind not in (LINEAR, CONV1D, EMBEDDING) or shape is None or len(shape) != 2:
            self.findings.append(f"{module}: targeted, but no linear layer or embedding: {way_out}")
            return
        if config.use_dora and (kind != LINEAR or (is_tied and config.ensure_weight_tying)):
            self.findings.append(f"{module}: DoRA on an embedding or a Conv1D layer: {way_out}")
        rank, turned = config.rank_of(module), kind != LINEAR
        inner, outer = shape if turned else shape[::-1]
        infix, suffix = ("embedding_", "") if kind == EMBEDDING else ("", ".weight")
        a, b = (f"{PEFT_PREFIX}{module}.lora_{infix}{half}{suffix}" for half in "AB")
        shapes: dict[str, Shape] = {a: (rank, inner), b: (outer, rank)}
        magnitude = f"{PEFT_PREFIX}{module}.lora_magnitude_vector" if config.use_dora else ""
        if magnitude:
            shapes[magnitude] = (outer,)
        term = _pair(a, b, config.scale_of(module), transpose=turned, magnitude=magnitude)
        self._take(name, shapes, term, alone=is_tied)

    def _take_parameters(self) -> None:
        """Take the pairs on single parameters (`target_parameters`).

        peft nests the wrappers of a module's parameters; the first parameter is innermost.
        """
        by_module = dict[str, list[str]]()
        for name in self.model.parameters:
            if ends_with(name, self.config.target_parameters):
                by_module.setdefault(name.rpartition(".")[0], []).append(name)
        for module, names in by_module.items():
            if self.config.use_dora:
                self.findings.append(f"{module}: target_parameters does not support use_dora")
                continue
            for index, name in enumerate(names):
                prefix = PEFT_PREFIX + module + ".base_layer" * (len(names) - 1 - index)
                a, b = (f"{prefix}.lora_{half}.weight" for half in "AB")
                shape = self.model.parameters[name]
                if len(shape) not in (2, 3):
                    self.findings.append(f"{name}: targeted, but no matrix nor a stack of them")
                    continue
                experts = shape[0] if len(shape) == 3 else 1
                rank = self.config.rank_of(name) * experts
                turned = len(shape) == 3 and self._is_turned(module, name, (a, b), rank)
                inner, outer = shape[-2:] if turned else shape[:-3:-1]
                scale = self.config.scale_of(name)
                term = _pair(a, b, scale, transpose=turned, experts=experts)
                shapes = {a: (rank, inner), b: (outer, rank)}
                self._take(name, shapes, term, alone=self._is_tied(name))

    def _is_turned(self, module: str, name: str, pair: tuple[str, str], rank: int) -> bool:
        """Return True if A works on the second to last axis of a stack of experts, B on the last.

        Since peft 0.19.1 that is so if the module has `is_transposed`, before it was always so
        (`ParamWrapper.update_layer`): shapes tell, unless the parameter is square.
        """
        *_, rows, columns = self.model.parameters[name]
        shapes = [tuple(self.file[key].shape) for key in pair if key in self.file]
        if rows != columns and shapes:
            return shapes == [(rank, rows), (columns, rank)]
        is_transposed = module in self.model.transposed
        match = _VERSION.match(self.config.peft_version)
        version = tuple(map(int, match.groups())) if match else (0, 0, 0)
        if rows == columns and not is_transposed and version < (0, 19, 1):
            self.findings.append(
                f"{name}: peft before 0.19.1 lays out the factors of this square parameter "
                "differently, and adapter_config.json records "
                f"{self.config.peft_version or 'no version'}: if a newer peft trained it, write "
                '"peft_version": "0.19.1" into it; else load and save it with the current peft'
            )
        return is_transposed

    def _take_saved(self) -> set[str]:
        """Take every tensor of `modules_to_save`: modules whose name ends with one of its names."""
        model, suffixes = self.model, self.config.modules_to_save
        inside = tuple(f"{name}." for name in model.modules if name.endswith(suffixes))
        names = [name for name in model.parameters if name.startswith(inside)]
        if self.config.ensure_weight_tying:  # peft stores the tensor under each of its names
            names = [name for name in names if model.ties.get(name) not in names]
        for name in names:
            self._take_full(name, PEFT_PREFIX + name, alone=True)
        return set(names)

    def _take_rows(self) -> None:
        """Take the rows of embeddings that `trainable_token_indices` trained."""
        config, model = self.config, self.model
        rows_of: dict[str, tuple[int, ...]] = {}
        for suffix, rows in config.trainable_token_indices.items():
            for module in model.modules if suffix else [model.input_embedding]:
                if module and module.endswith(suffix):
                    rows_of[module] = rows
        if config.trainable_token_indices and not rows_of:
            names = sorted(config.trainable_token_indices)
            self.findings.append(f"trainable_token_indices: the model has no {names}")
        embedding = rows_of.get(model.input_embedding)
        together = all(rows == embedding for rows in rows_of.values()) or config.ensure_weight_tying
        for module, indices in rows_of.items():
            name = f"{module}.weight"
            shape = self.shape(name)
            if shape is None or len(shape) != 2:
                self.findings.append(f"{module}: in trainable_token_indices, but not an embedding")
                continue
            tied = f"{model.input_embedding}.weight" in model.partners(name)
            if tied and module != model.input_embedding and indices == embedding:
                continue  # the rows of a tied tensor are stored once, with the input embedding
            if outside := [row for row in indices if row >= shape[0]]:
                self.findings.append(f"{module}: token {outside[0]} is outside its {shape[0]} rows")
            key = f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta"
            alone = self._is_tied(name) and not together
            term = Rows(f"{INPUT}:{key}", indices)
            self._take(name, {key: (len(indices), shape[1])}, term, alone=alone)

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
        trained = {module for module in modules if known & set(_stored_keys(module))}
        shared = {name for module in trained for name in model.partners(f"{module}.weight")}
        for module in modules:
            name = f"{module}.weight"
            keys = [key for key in _stored_keys(module) if key in self.file]
            if name not in model.parameters or not keys or module in trained:
                continue
            if name in shared:  # tied to a trained module: a copy, or its value before training
                if not self.config.ensure_weight_tying:
                    self._take_full(name, keys[0], alone=True)
            elif not seen & model.partners(name):  # the copy under another tied name is the same
                self._take_full(name, keys[0], alone=False)
            seen |= model.partners(name)
        for module in modules:  # a head's bias is stored with its weight
            keys = [key for key in _stored_keys(module, "bias") if key in self.file]
            if f"{module}.bias" in model.parameters and keys and keys[0] not in self.wanted:
                self._take_full(f"{module}.bias", keys[0], alone=False)

    def problems(self) -> list[str]:
        """Return the tensors that are missing, of another shape, or unexpected."""
        wanted, file = self.wanted, self.file
        problems = []
        for key, shape in wanted.items():
            tensor = file.get(key)
            if tensor is None:
                problems.append(f"{key}: missing")
            elif 0 in tensor.shape or not tensor.shape:
                why = "saved under ZeRO-3 or FSDP without gathering it first"
                problems.append(f"{key}: is {list(tensor.shape)}: {why}")
            elif tuple(tensor.shape) != shape:
                why = f"the model and the rank need {list(shape)}"
                problems.append(f"{key}: is {list(tensor.shape)}, {why}")
            elif not is_float(tensor.dtype):
                text = describe(tensor.shape, tensor.dtype)
                problems.append(f"{key}: {text} is not a float tensor")
        unexpected = sorted(set(file) - set(wanted) - set(self.dropped()))
        present = sum(key in file for key in wanted)
        if not present:  # a finding for each tensor would say the same thousands of times
            reason = "it has none of the tensors that its configuration needs"
            if not file or not wanted:
                reason = "the model has none of its target modules" if file else "it has no tensors"
            problems = [f"the adapter matches nothing: {reason}", *problems[:1]]
            unexpected = unexpected[:_FIRST]
        elif present < len(wanted):
            problems.insert(0, f"the adapter has only {present} of {len(wanted)} needed tensors")
        return problems + [f"{key}: unexpected" for key in unexpected]

    def dropped(self) -> dict[str, tuple[str, str]]:
        """Return the tensors that the merge does not need, each with the reason and its original.

        Both must have the same bytes; the original is "" if they do not matter.
        """
        copies = {key: self._copy(key) for key in sorted(set(self.file) - set(self.wanted))}
        return {key: copy for key, copy in copies.items() if copy[0]}

    def _copy(self, key: str) -> tuple[str, str]:
        """Return why a tensor may be left out, and the tensor that it repeats; "" for none."""
        plain = _COPIES.sub(".", key)
        if plain != key and (plain in self.wanted or key.endswith("trainable_tokens_original")):
            original = plain if ".modules_to_save." in key else ""
            return "a copy that peft keeps beside the trained tensor", original
        for alias, holder in self.model.ties.items():
            module = PEFT_PREFIX + alias.removesuffix(".weight")
            for piece in self.pieces:
                if piece.alone or piece.target not in self.model.partners(alias):
                    continue
                names = tuple(f"{module}.lora_{half}.weight" for half in "AB")
                if isinstance(piece.term, Rows):
                    names = (f"{module}.token_adapter.trainable_tokens_delta",)
                if piece.stored:
                    names = _stored_keys(module.removeprefix(PEFT_PREFIX))
                if {key, plain} & set(names):
                    original = "" if ".original_module." in key else piece.stored
                    return f"tied to {holder}, which is stored too", original
        return "", ""


def _pair(a: str, b: str, scale: float, *, magnitude: str = "", **how: Any) -> LowRank:
    magnitude = f"{INPUT}:{magnitude}" if magnitude else ""
    return LowRank(f"{INPUT}:{a}", f"{INPUT}:{b}", scale, magnitude=magnitude, **how)


def pair_by_names(
    config: AdapterConfig, model: Model, file: Tensors
) -> tuple[Pairing, list[Piece]]:
    """Pair a file with a model by the names that fit better: those in memory or those on disk.

    Returns the pairing, and its pieces by their names in memory.
    """
    pairing = Pairing(config, model, file)
    if pairing.unmatched and any(slot.key not in model.parameters for slot in model.slots):
        older = Pairing(config, _by_disk_names(model), file)
        if older.unmatched < pairing.unmatched:
            names = renamed_keys(model)
            return older, [replace(x, target=names.get(x.target, x.target)) for x in older.pieces]
    return pairing, pairing.pieces


def _stored_keys(module: str, part: str = "weight") -> tuple[str, ...]:
    """Return the keys under which peft may store a full embedding, or its bias."""
    infixes = ("", "base_layer.", "token_adapter.base_layer.")
    return tuple(f"{PEFT_PREFIX}{module}.{infix}{part}" for infix in infixes)


def renamed_keys(model: Model) -> dict[str, str]:
    """Return the live name by key on disk, of tensors that differ by nothing but the name."""
    live = {slot.live for slot in model.slots}
    counts = Counter(slot.key for slot in model.slots)
    return {
        slot.key: slot.live
        for slot in model.slots
        if slot.key not in live and slot.is_renamed and counts[slot.key] == 1
    }


def _by_disk_names(model: Model) -> Model:
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
    transposed = set()
    for name, shape in parameters.items():
        module, now = name.rpartition(".")[0], kept.get(name, "").rpartition(".")[0]
        parents = module.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            modules.setdefault(".".join(parents[:depth]), OTHER)
        kind = model.modules.get(now, OTHER)
        if kind == OTHER and name.endswith(".weight") and len(shape) == 2:
            kind = LINEAR
        if modules.get(module, OTHER) == OTHER:
            modules[module] = kind
        if now in model.transposed:
            transposed.add(module)

    def renamed(module: str) -> str:
        return names.get(f"{module}.weight", module).removesuffix(".weight")

    return Model(
        parameters,
        modules,
        {names.get(alias, alias): names.get(to, to) for alias, to in model.ties.items()},
        frozenset(transposed),
        renamed(model.input_embedding),
        renamed(model.output_embedding),
    )


# Changes of a model.


@dataclass
class Changes:
    """Changes of live tensors; a tensor that is not named stays as it is.

    Terms apply to a tensor's replacement, if it has one. If an adapter changes only a part of a
    live tensor (one expert of a stack), the part's key on disk is used as the live name. If there
    are findings, ignore the other fields.
    """

    terms: dict[str, list[Term]] = field(default_factory=dict)  # by live name, in order
    # "adapter:<key>" of the tensor that replaces the base's, by live name
    replacements: dict[str, str] = field(default_factory=dict)
    # Live names that were tied and have to be stored separately from now on. Without a replacement
    # or terms, such a tensor is a copy of the base tensor that it was tied to. A change of any
    # other tied tensor applies to all its names and is listed under the stored name.
    unties: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)  # adapter tensor without use -> reason
    copies: dict[str, str] = field(default_factory=dict)  # key of a dropped one -> its equal
    # Every tensor of the adapter as "adapter:<key>", as terms and replacements name them
    operands: dict[str, Tensor] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # everything that is wrong


def changes(adapter: Adapter, model: Model) -> Changes:
    """Return the changes of a model's tensors by an adapter, as peft merges it."""
    if adapter.findings:
        return Changes(findings=[f"{CONFIG}: {finding}" for finding in adapter.findings])
    pairing, pieces = pair_by_names(adapter.config, model, adapter.tensors)
    dropped = pairing.dropped()
    untied = {name for piece in pieces if piece.alone for name in model.partners(piece.target)}
    total = Changes(
        unties=tuple(sorted(untied & set(model.ties))),
        dropped={f"{INPUT}:{key}": reason for key, (reason, _) in dropped.items()},
        copies={key: original for key, (_, original) in dropped.items() if original},
        operands={f"{INPUT}:{key}": tensor for key, tensor in adapter.tensors.items()},
        findings=[*pairing.findings, *pairing.problems()],
    )
    for piece in pieces:
        names = [model.ties.get(piece.target, piece.target)]
        if piece.target in untied:
            names = [piece.target] if piece.alone else sorted(model.partners(piece.target))
        for name in names:
            if piece.stored:
                total.replacements[name] = f"{INPUT}:{piece.stored}"
            if piece.term is None:
                continue
            terms = total.terms.setdefault(name, [])
            both = [*terms, piece.term]
            rows = sum(isinstance(each, Rows) for each in both)
            dora = any(isinstance(each, LowRank) and each.magnitude for each in both)
            if rows > 1 or (rows and dora):
                text = "rows of a tied tensor are trained twice, or with DoRA"
                total.findings.append(f"{name}: {text}: merge it with peft's merge_and_unload")
            # peft adds LoRA to the rows that were trained.
            terms.insert(0 if isinstance(piece.term, Rows) else len(terms), piece.term)
    return total


def adapter_contract(base: Path, adapter_config: Path, dtype: str = "BF16") -> list[Expected]:
    """Return the tensors that `adapter_model.safetensors` has to contain."""
    config, findings = parse_config(read_json(adapter_config))
    pairing = Pairing(config, model_facts(base), {})
    if findings := [*findings, *pairing.findings]:
        raise ArtifactError(
            f"{adapter_config}: does not fit {base}: {first_and_more(findings)}", details=findings
        )
    return [Expected(key, shape, dtype) for key, shape in pairing.wanted.items()]


# Numbers of an adapter, before anything is written.

_BLOCK = 4 << 20
FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?$")


def require_values(
    adapter: Adapter, copies: Mapping[str, str] | None = None, *, scanned: bool = False
) -> None:
    """Check the numbers of an adapter, and that `copies` (of `Changes`) equal their originals.

    NaN, infinity, magnitudes of zeros and an adapter without effect are refused. A pair with an
    all-zero A or B changes nothing. Some may: a module that saw no data stays as it was
    initialised. If all do, the adapter was not trained, or not saved from the trained model.
    `scanned` is True if an audit has read them, and has the same findings.

    Raises:
        ContractError: has every finding.
    """
    findings: list[str] = []
    pairs: set[str] = set()
    zeros: set[str] = set()
    for key, tensor in () if scanned else sorted(adapter.tensors.items()):
        bad, zero = 0, True
        for raw in _blocks(tensor):
            bad += nonfinite(raw, tensor.dtype)
            zero = zero and all_zero(raw, tensor.dtype)
        if bad:
            findings.append(f"{key}: {bad} elements are NaN or infinite")
        if (factor := FACTOR.search(key)) is None:
            continue
        if factor[1] != "magnitude_vector":
            pairs.add(key[: factor.start()])
            zeros |= {key[: factor.start()]} if zero else set()
        elif zero:
            findings.append(f"{key}: all zero: not saved from the trained model")
    if pairs and pairs == zeros:
        findings.append(
            f"all {len(pairs)} LoRA pairs have a factor that is all zero: the adapter was not "
            "trained, or not saved from the trained model"
        )
    for key, original in (copies or {}).items():
        if not _are_equal(adapter.tensors[key], adapter.tensors[original]):
            findings.append(f"{key}: differs from its original {original}")
    if findings:
        raise ContractError(
            f"adapter: {adapter.root.name}: {first_and_more(findings)}", details=findings
        )


def _are_equal(copy: Tensor, original: Tensor) -> bool:
    if (copy.shape, copy.dtype) != (original.shape, original.dtype):
        return False
    return all(np.array_equal(*both) for both in zip(_blocks(copy), _blocks(original), strict=True))


def _blocks(tensor: Tensor) -> Iterator[NDArray[np.uint8]]:
    """Yield a tensor's bytes in blocks."""
    with Reader(tensor.extents) as stream:
        for at in range(0, stream.nbytes, _BLOCK):
            yield stream.read(at, min(_BLOCK, stream.nbytes - at))
