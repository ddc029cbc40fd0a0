"""Findings on the tensors of an adapter's file, compared with its contract."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tasks.core.contract import describe
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.piece import Piece, stored_keys
from tasks.weights.adapters.pieces import Contract
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.names import EXPERT, PEFT_PREFIX
from tasks.weights.plan.adapter_ops import Rows

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


def misfits(contract: Contract) -> Iterator[str]:
    """Yield findings on the tensors that the contract expects: missing, or of another shape."""
    wanted = contract.wanted()
    present = [key for key in wanted if key in contract.file_tensors]
    if not contract.file_tensors:
        yield "the adapter holds no tensors"
        return
    if not wanted:
        yield "the adapter matches nothing: the model has none of its target modules"
        return
    if not present:
        yield (
            "the adapter matches nothing: it has none of the tensors that its configuration needs; "
            f"they are {next(iter(wanted))} and {len(wanted) - 1} more, and it has "
            f"{min(contract.file_tensors)} and {len(contract.file_tensors) - 1} more"
        )
        return
    if len(present) < len(wanted):
        yield f"the adapter covers only {len(present)} of the {len(wanted)} tensors it has to hold"
    for key, shape in wanted.items():
        have = contract.file_tensors.get(key)
        if have is None:
            yield f"{key}: missing"
        elif 0 in have.shape or not have.shape:
            yield (
                f"{key}: has shape {list(have.shape)}: it was saved under ZeRO-3 or FSDP without "
                "gathering it first"
            )
        elif tuple(have.shape) != shape:
            yield f"{key}: is {list(have.shape)}, the model and the rank need {list(shape)}"
        elif not is_float(have.dtype):
            yield f"{key}: {describe(have.shape, have.dtype)} is not a float tensor"


@dataclass(frozen=True)
class Copy:
    """Reason to leave out a tensor.

    Attributes:
        reason: the reason, for people.
        of: key of the tensor that must have the same bytes; "" if its bytes do not matter.
    """

    reason: str
    of: str = ""


def copy_of(key: str, contract: Contract, wanted: Collection[str]) -> Copy | None:
    """Return the reason why a tensor that no piece uses may be left out; None if it may not.

    Args:
        key: key of the tensor in the adapter's file.
        contract: contract of the adapter.
        wanted: keys that the contract expects.
    """
    if _TRAINING.search(key):
        return Copy("training state, which a merged model does not need")
    plain = _COPIES.sub(".", key)
    if plain != key and (plain in wanted or key.endswith("trainable_tokens_original")):
        of = plain if ".modules_to_save." in key else ""
        return Copy("a copy that peft keeps beside the trained tensor", of)
    for alias, holder in contract.live.tied.items():
        partners = contract.live.partners(alias)
        for piece in contract.pieces:
            if piece.target in partners and not piece.alone:
                tied = _tied_keys(alias, piece)
                if key in tied or plain in tied:
                    of = "" if ".original_module." in key else piece.stored
                    return Copy(f"tied to {holder}, which is stored too", of)
    return None


def _tied_keys(name: str, piece: Piece) -> tuple[str, ...]:
    """Return the keys under which peft stores a piece again, for another name of a tied tensor."""
    module = name.removesuffix(".weight")
    if piece.stored:
        return stored_keys(module)
    if isinstance(piece.term, Rows):
        return (f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta",)
    return tuple(f"{PEFT_PREFIX}{module}.lora_{half}.weight" for half in "AB")


def hint_on(key: str, absent: Sequence[str], live: LiveModel) -> str:
    """Return a hint on a key that no piece uses; "" for none.

    Args:
        key: key in the adapter's file.
        absent: keys that the contract expects and the file does not have.
        live: the model, by the names of the contract.
    """
    if not key.startswith(PEFT_PREFIX):
        return f"keys of an adapter start with {PEFT_PREFIX}"
    if _NAMED.search(key):
        return "it contains an adapter's name: save it with save_pretrained, which removes the name"
    if EXPERT.search(key) and not any(map(EXPERT.search, (*live.tensors, *live.stored))):
        return (
            "the adapter has separate experts, as in transformers 4, and the base stores them "
            "fused: use a base that stores them separately, as published ones do; or load the "
            "adapter with the current peft and save it again (not with rsLoRA: its scale changes)"
        )
    close = difflib.get_close_matches(key, absent, n=1)
    return f"near: {close[0]}" if close else ""
