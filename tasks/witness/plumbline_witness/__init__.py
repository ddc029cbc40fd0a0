"""Record in each checkpoint what the live model computes, for comparison with what is served.

callback   `WitnessCallback`, for Hugging Face's Trainer and everything built on it
record     `witness(model, tokenizer, out)`, for any other training loop
__main__   `python -m plumbline_witness -- <command>`: any trainer's command, unchanged
probes     token sequences to measure
measure    run the live model on them
prints     format of the files, which every later comparison reads

The record is a folder `plumbline.witness`: `witness.json`, and log-probabilities (`fingerprint.fp`,
`base.fp`, `noise.fp`) or the scores of a reward model (`scores.json`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback import WitnessCallback
    from .record import witness

__all__ = ["WitnessCallback", "witness"]


def __getattr__(name: str) -> Any:
    """Import on first use: `python -m plumbline_witness` needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "callback" if name == "WitnessCallback" else "record"
    return getattr(import_module(f"{__name__}.{module}"), name)
