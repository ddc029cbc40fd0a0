"""What is wrong between an adapter's file and what its configuration and the model ask for."""

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
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.plan.adapter_ops import Rows

_COPIES = re.compile(
    r"\.(original_module|modules_to_save|token_adapter\.(base_layer|trainable_tokens_original))\."
    r"|\.token_adapter\.trainable_tokens_original$"
)
"""Infixes of what peft stores of a wrapped embedding beside the trained tensor itself."""

_TRAINING = re.compile(r"\.lora_(velora_embed|monteclora_sampler)(\.|$)")
"""What VeLoRA and MonteCLoRA keep for training, beside a pair that is a plain one."""

_EXPERT = re.compile(r"\.experts\.\d+\.")

_NAMED = re.compile(
    r"\.lora_(A|B|embedding_[AB]|magnitude_vector)\.(?!(weight|bias)$)[^.]+(\.weight)?$"
)
"""Keys as a live model has them, with the adapter's name in them."""


def misfits(contract: Contract) -> Iterator[str]:
    """Findings about the tensors that the contract wants."""
    wanted = contract.wanted()
    present = [key for key in wanted if key in contract.held]
    if not contract.held:
        yield "the adapter holds no tensors"
        return
    if not wanted:
        yield "the adapter matches nothing: the model has none of the modules that it targets"
        return
    if not present:
        yield "the adapter matches nothing: none of the tensors its configuration asks for is there"
    elif len(present) < len(wanted):
        yield f"the adapter covers only {len(present)} of the {len(wanted)} tensors it has to hold"
    for key, shape in wanted.items():
        have = contract.held.get(key)
        if have is None:
            yield f"{key}: missing"
        elif 0 in have.shape or not have.shape:
            yield (
                f"{key}: has shape {list(have.shape)}: it was saved under ZeRO-3 or FSDP without "
                "gathering it first"
            )
        elif tuple(have.shape) != shape:
            yield f"{key}: is {list(have.shape)}, the model and the rank want {list(shape)}"
        elif not is_float(have.dtype):
            yield f"{key}: {describe(have.shape, have.dtype)} is no float tensor"


@dataclass(frozen=True)
class Copy:
    """A tensor that is left out. `of`: the key whose bytes it must have; "" for no matter which."""

    reason: str
    of: str = ""


def copy_of(key: str, contract: Contract, wanted: Collection[str]) -> Copy | None:
    """Why a tensor that no piece wants may be left out; None when it may not."""
    if _TRAINING.search(key):
        return Copy("a state of training, which the merged model has no use for")
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
    """Keys under which peft stores a piece once more, for the other name of a tied tensor."""
    module = name.removesuffix(".weight")
    if piece.stored:
        return stored_keys(module)
    if isinstance(piece.term, Rows):
        return (f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta",)
    return tuple(f"{PEFT_PREFIX}{module}.lora_{half}.weight" for half in "AB")


def hint_on(key: str, absent: Sequence[str], live: LiveModel) -> str:
    """What may have gone wrong with a key that no piece wants.

    Args:
        key: in the adapter's file.
        absent: keys that are wanted and not in it.
        live: the model by the names that were tried.
    """
    if not key.startswith(PEFT_PREFIX):
        return f"keys of an adapter start with {PEFT_PREFIX}"
    if _NAMED.search(key):
        return "it carries an adapter's name: save it with save_pretrained, which takes that out"
    if _EXPERT.search(key) and not any(map(_EXPERT.search, (*live.tensors, *live.stored))):
        return (
            "experts one by one, as transformers 4 had them, and the base stores them fused: give "
            "a base that stores them one by one, as published ones do; or load the adapter with "
            "the current peft and save it again (not one with rsLoRA: that changes its scale)"
        )
    close = difflib.get_close_matches(key, absent, n=1)
    return f"near: {close[0]}" if close else ""
