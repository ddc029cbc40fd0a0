"""Open a PEFT adapter, and combine adapters into changes of a model's tensors in memory, as terms.

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
from dataclasses import dataclass, field, replace
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
from tasks.weights.files.tensors import Reader, Tensor, Tensors
from tasks.weights.lora_config import AdapterConfig, parse_config
from tasks.weights.model import Model, model_facts
from tasks.weights.pairing import Pairing, Piece, pair_by_names
from tasks.weights.pickled.torch_file import read_state
from tasks.weights.plan import OPERANDS, Dora, Rows, Term

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


@dataclass
class Changes:
    """Changes of live tensors; a tensor that is not named stays as it is.

    Terms apply to a tensor's replacement, if it has one. If an adapter changes only a part of a
    live tensor (one expert of a stack), the part's key on disk is used as the live name, and its
    terms come after those of the stack. If there are findings, ignore the other fields.
    """

    terms: dict[str, list[Term]] = field(default_factory=dict)  # by live name, in order
    # Tensor of an adapter that replaces the base's, by live name
    replacements: dict[str, str] = field(default_factory=dict)
    # Live names that were tied and have to be stored separately from now on. Without a replacement
    # or terms, such a tensor is a copy of the base tensor that it was tied to. A change of any
    # other tied tensor applies to all its names and is listed under the stored name.
    unties: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)  # adapter tensor without use -> reason
    # Dropped tensor -> tensor that must have the same bytes
    copies: dict[str, str] = field(default_factory=dict)
    # Every tensor of the adapters as "<adapter>:<key>", as all the fields above name them
    operands: dict[str, Tensor] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # everything that is wrong


def changes(adapters: Sequence[tuple[Adapter, float]], model: Model) -> Changes:
    """Combine adapters with different names, each with its weight; 1.0 merges it as trained.

    The result is `W + sum_i w_i * scale_i * B_i @ A_i`, added in the order given, as peft merges
    one adapter after another, each with `set_scale(w)`.
    """
    total = Changes()
    if len({adapter.name for adapter, _ in adapters}) < len(adapters):
        total.findings.append("two adapters have the same name")
    if not adapters:
        total.findings.append("no adapter to merge")
    paired = [(each, weight, _paired(total, each, weight, model)) for each, weight in adapters]
    pieces = [piece for *_, of in paired for piece in of]
    untied = {name for piece in pieces if piece.alone for name in model.partners(piece.target)}
    for adapter, weight, of in paired:
        earlier = {*total.replacements, *total.terms}
        for piece in of:
            for name in _stored_names(piece, model, untied):
                if name in earlier and (piece.stored or name in total.replacements):
                    total.findings.append(f"{name}: replaced by one adapter, changed by another")
                _add(total, name, piece, adapter, weight)
    total.unties = tuple(sorted(untied & set(model.ties)))
    return total


def _paired(total: Changes, adapter: Adapter, weight: float, model: Model) -> list[Piece]:
    """Pair the tensors of an adapter with those of the model."""
    total.operands |= {f"{adapter.name}:{k}": info for k, info in adapter.tensors.items()}
    where = f"{adapter.root.name}: " if adapter.name != "adapter" else ""
    if adapter.findings:
        total.findings += [f"{where}{CONFIG}: {finding}" for finding in adapter.findings]
        return []
    pairing, pieces = pair_by_names(adapter.config, model, adapter.tensors)
    texts = [*pairing.findings, *pairing.problems()]
    if not math.isfinite(weight) or weight == 0:
        texts.append(f"weight {weight} of the adapter is not a finite number other than 0")
    total.findings += [where + text for text in texts]
    for key, (reason, original) in pairing.dropped().items():
        total.dropped[f"{adapter.name}:{key}"] = reason
        if original:
            total.copies[f"{adapter.name}:{key}"] = f"{adapter.name}:{original}"
    return pieces


def _stored_names(piece: Piece, model: Model, untied: Collection[str]) -> list[str]:
    """Return the stored tensors that a piece changes; several if they are no longer tied."""
    name = piece.target
    if name not in untied:
        return [model.ties.get(name, name)]
    return [name] if piece.alone else sorted(model.partners(name))


def _add(total: Changes, name: str, piece: Piece, adapter: Adapter, weight: float) -> None:
    """Add one piece under a name, with operands that name the adapter."""
    if weight != 1 and (piece.stored or isinstance(piece.term, Rows)):
        total.findings.append(
            f"{name}: is stored as a full tensor, so weight {weight} cannot scale it"
        )
    if piece.stored:
        total.replacements[name] = f"{adapter.name}:{piece.stored}"
    if piece.term is None:
        return
    term, before = _bound(piece.term, adapter.name, weight), total.terms.setdefault(name, [])
    if before and any(isinstance(each, Dora) for each in (*before, term)):
        total.findings.append(
            f"{name}: DoRA normalises the weights of the base, so its change cannot be added to"
            " another adapter's, and a merge of one after the other is not their sum: deliver"
            " each of them alone, source=<its folder>, or train one with all the data"
        )
    if isinstance(term, Rows):
        rows = {row for other in before if isinstance(other, Rows) for row in other.indices}
        if twice := rows & set(term.indices):
            total.findings.append(f"{name}: two adapters replace row {min(twice)}")
    before.append(term)


def _bound(term: Term, adapter: str, weight: float) -> Term:
    """Return the term with operands "<adapter>:<key>" and its scale times the weight."""
    names = (name for name in OPERANDS if hasattr(term, name))
    bound: dict[str, Any] = {name: f"{adapter}:{getattr(term, name)}" for name in names}
    if not isinstance(term, Rows):
        bound["scale"] = term.scale * weight
    return replace(term, **bound)


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
    findings = [f"{each.root.name}: {text}" for each in adapters for text in value_findings(each)]
    by_name = {adapter.name: adapter for adapter in adapters}
    for copy, original in (copies or {}).items():
        name, _, key = copy.partition(":")
        of = original.partition(":")[2]
        if not _same(by_name[name].tensors, key, of):
            findings.append(f"{by_name[name].root.name}: {key}: differs from its original {of}")
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
        for raw in _blocks(adapter.tensors, key):
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


def _same(source: Tensors, key: str, of: str) -> bool:
    copy, original = source[key], source[of]
    if (tuple(copy.shape), copy.dtype) != (tuple(original.shape), original.dtype):
        return False
    pairs = zip(_blocks(source, key), _blocks(source, of), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def _blocks(source: Tensors, key: str) -> Iterator[NDArray[np.uint8]]:
    """Yield a tensor's bytes in blocks; each block is valid until the next one is read."""
    with Reader(source[key].extents) as stream:
        buffer: NDArray[np.uint8] = np.empty(min(_BLOCK, stream.nbytes), np.uint8)
        for at in range(0, stream.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, stream.nbytes - at)]
            stream.into(memoryview(block), at)
            yield block
