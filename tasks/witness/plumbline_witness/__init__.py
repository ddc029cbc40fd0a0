"""Record in each checkpoint what the live model computes, for comparison with what is served.

callback   `WitnessCallback`, for Hugging Face's Trainer and everything built on it
record     `witness(model, tokenizer, out)`, for any other training loop
__main__   `python -m plumbline_witness -- <command>`: any trainer's command, unchanged

The record is a folder `plumbline.witness`: `witness.json`, and log-probabilities (`fingerprint.fp`,
`base.fp`) or the scores of a reward model (`scores.json`).
"""

from __future__ import annotations

from .callback import WitnessCallback
from .record import FOLDER, witness

__all__ = ["FOLDER", "WitnessCallback", "witness"]
