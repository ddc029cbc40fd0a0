"""Pair a PEFT adapter with a model: changes of the tensors in memory, as terms.

    adapter = read_adapter(folder)                        # headers and configuration
    total = changes([(adapter, 1.0)], model)              # terms by live name
    total.findings                                        # everything that does not fit
    require_values([adapter], total.copies)               # reads the data once

`pairing.py` has peft's rules for a single adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import Expected
from tasks.core.errors import ArtifactError, ContractError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import all_zero, nonfinite
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.reader import ADAPTER, read_checkpoint, weight_files
from tasks.weights.files.tensors import Reader, Tensors
from tasks.weights.lora_config import AdapterConfig, parse_config
from tasks.weights.mapping import Shape
from tasks.weights.model import Model, model_facts
from tasks.weights.pairing import Pairing, Piece, pair_by_names
from tasks.weights.pickled.torch_file import read_state
from tasks.weights.plan import Dora, Dropped, Rows, Term

CONFIG = "adapter_config.json"
PICKLED = f"{ADAPTER}.bin"


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on disk."""

    root: Path
    name: str  # its name in plans; operands of its terms are "<name>:<key>"
    config: AdapterConfig
    tensors: Tensors
    findings: tuple[str, ...] = ()  # reasons in its configuration why it cannot be merged


def read_adapter(folder: Path, name: str = "adapter", *, beside: Collection[str] = ()) -> Adapter:
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
    return Adapter(folder, name, config, tensors, tuple(findings))


@dataclass(frozen=True)
class Changes:
    """Changes of live tensors; a tensor that is not named stays as it is.

    Terms apply to a tensor's replacement, if it has one. If an adapter changes only a part of a
    live tensor (one expert of a stack), the part's key on disk is used as the live name, and its
    terms come after those of the stack.
    """

    terms: Mapping[str, tuple[Term, ...]]  # by live name, in order; operands "<adapter>:<key>"
    replacements: Mapping[str, str]  # "<adapter>:<key>" of the base's replacement, by live name
    shapes: Mapping[str, Shape]  # of replacements with another number of rows, by live name
    # Live names that were tied and have to be stored separately from now on. Without a replacement
    # or terms, such a tensor is a copy of the base tensor that it was tied to. A change of any
    # other tied tensor applies to all its names and is listed under the stored name.
    unties: tuple[str, ...]
    dropped: tuple[Dropped, ...]  # adapter tensors that the merge does not use
    copies: Mapping[str, str]  # dropped tensor -> tensor that must have the same bytes
    findings: tuple[str, ...]  # everything that is wrong; if any, ignore the other fields


def changes(adapters: Sequence[tuple[Adapter, float]], model: Model) -> Changes:
    """Combine adapters with different names, each with its weight; 1.0 merges it as trained.

    The result is `W + sum_i w_i * scale_i * B_i @ A_i`, added in the order given, as peft merges
    one adapter after another, each with `set_scale(w)`.
    """
    total = _Sum(model)
    for adapter, weight in adapters:
        total.pair(adapter, weight)
    if len({adapter.name for adapter, _ in adapters}) < len(adapters):
        total.findings.append("two adapters have the same name")
    if not adapters:
        total.findings.append("no adapter to merge")
    pieces = [piece for *_, paired in total.paired for piece in paired]
    untied = {name for piece in pieces if piece.alone for name in model.partners(piece.target)}
    for adapter, weight, paired in total.paired:
        earlier = {*total.replacements, *total.terms}
        for piece in paired:
            for name in _stored_names(piece, model, untied):
                if name in earlier and (piece.stored or name in total.replacements):
                    total.findings.append(f"{name}: replaced by one adapter, changed by another")
                total.add(name, piece, adapter, weight)
    total.check_rows()
    return Changes(
        terms={name: tuple(terms) for name, terms in total.terms.items()},
        replacements=total.replacements,
        shapes=total.shapes,
        unties=tuple(sorted(untied & set(model.ties))),
        dropped=tuple(total.dropped),
        copies=total.copies,
        findings=tuple(total.findings),
    )


def _stored_names(piece: Piece, model: Model, untied: Collection[str]) -> list[str]:
    """Return the stored tensors that a piece changes; several if they are no longer tied."""
    name = piece.target
    if name not in untied:
        return [model.ties.get(name, name)]
    return [name] if piece.alone else sorted(model.partners(name))


class _Sum:
    """Running sum of adapters; attributes are those of `Changes`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.paired: list[tuple[Adapter, float, list[Piece]]] = []
        self.terms: dict[str, list[Term]] = {}
        self.replacements: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.dropped: list[Dropped] = []
        self.copies: dict[str, str] = {}
        self.findings: list[str] = []

    def pair(self, adapter: Adapter, weight: float) -> None:
        """Pair the tensors of an adapter with those of the model."""
        where = f"{adapter.root.name}: " if adapter.name != "adapter" else ""
        if adapter.findings:
            self.findings += [f"{where}{CONFIG}: {finding}" for finding in adapter.findings]
            return
        pairing, pieces = pair_by_names(adapter.config, self.model, adapter.tensors)
        texts = [*pairing.findings, *pairing.problems()]
        if not math.isfinite(weight) or weight == 0:
            texts.append(f"weight {weight} of the adapter is not a finite number other than 0")
        self.findings += [where + text for text in texts]
        self.paired.append((adapter, weight, pieces))
        for key, (reason, original) in pairing.dropped().items():
            self.dropped.append(Dropped(f"{adapter.name}:{key}", reason))
            if original:
                self.copies[f"{adapter.name}:{key}"] = f"{adapter.name}:{original}"

    def add(self, name: str, piece: Piece, adapter: Adapter, weight: float) -> None:
        """Add one piece under a name, with operands that name the adapter."""
        if weight != 1 and (piece.stored or isinstance(piece.term, Rows)):
            self.findings.append(
                f"{name}: is stored as a full tensor, so weight {weight} cannot scale it"
            )
        if piece.stored:
            self.replacements[name] = f"{adapter.name}:{piece.stored}"
            stored = adapter.tensors.get(piece.stored)
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
_FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?$")


def require_values(adapters: Sequence[Adapter], copies: Mapping[str, str] | None = None) -> None:
    """Check the numbers of all adapters, and that dropped copies equal their originals.

    `copies` is that of `Changes`. Raises ContractError with every finding.
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
    for key, info in sorted(adapter.tensors.items()):
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
    copy, original = adapter.tensors[key], adapter.tensors[of]
    if (tuple(copy.shape), copy.dtype) != (tuple(original.shape), original.dtype):
        return False
    pairs = zip(_blocks(adapter, key), _blocks(adapter, of), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _blocks(adapter: Adapter, key: str) -> Iterator[NDArray[np.uint8]]:
    """Yield a tensor's bytes in blocks; each block is valid until the next one is read."""
    with Reader(adapter.tensors[key].extents) as stream:
        buffer: NDArray[np.uint8] = np.empty(min(_BLOCK, stream.nbytes), np.uint8)
        for at in range(0, stream.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, stream.nbytes - at)]
            stream.into(memoryview(block), at)
            yield block
