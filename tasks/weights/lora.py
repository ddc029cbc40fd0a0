"""Open a PEFT adapter, and turn it into changes of a model's tensors in memory, as terms.

    adapter = read_adapter(folder)               # headers and configuration
    total = changes(adapter, model)              # terms by live name
    total.findings                               # everything that does not fit
    require_values(adapter, total.copies)        # reads the data once

`pairing.py` has peft's rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from tasks.weights.pairing import INPUT, Pairing, pair_by_names
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
