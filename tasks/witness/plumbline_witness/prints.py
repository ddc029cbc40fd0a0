"""Files of a record: fingerprints of language models, scores of reward models.

A fingerprint has, for every scored position of fixed probes, the log-probabilities (nats) of K
token ids. The first fingerprint (of the live training engine) chooses the ids: its K most likely
tokens, or the whole vocabulary if that is not larger than K. Every later fingerprint is taken *at
the same ids*, so any two are comparable. All other ids form one rest bucket: the KL is a lower
bound, and exact if the vocabulary fits into K.

The record and every later comparison read and write these files with this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDER = "plumbline.witness"
FORMAT = 1
"""Version of a record. A reader refuses a higher one."""
FINGERPRINT, SCORES = "fingerprint.fp", "scores.json"
BASE = "base.fp"
"""Log-probabilities of the model without its adapter, at the same ids."""
NOISE = "noise.fp"
"""Log-probabilities of the first probes with other rounding errors of 16 bits."""

TOP_K = 512
"""Ids per position. A vocabulary of this size or smaller is covered completely."""
BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Significant bits by dtype (torch name)."""
FINE = 2.0**-14
"""A rounding step below this is of 32-bit logits."""
TINY = 1e-12
UNREADABLE = (OSError, KeyError, TypeError, ValueError, SafetensorError)
"""Errors of `load` for a file that is none of its kind."""


def rounding_step(logits: NDArray[Any] | float, dtype: str = "bfloat16") -> NDArray[np.float32]:
    """Return the distance (nats) of neighbouring numbers of a dtype at these magnitudes."""
    values = np.asarray(logits, np.float64)
    exponents = np.frexp(np.abs(values))[1] - BITS[dtype]
    steps: NDArray[np.float32] = np.where(values == 0, 2.0**-133, np.ldexp(1.0, exponents))
    return steps.astype(np.float32)


def largest_steps(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `Fingerprint.steps` of logits of the whole vocabulary: (N, V) to (N,).

    The dtype is inferred from the values, since engines return bf16 logits in fp32 arrays.
    """
    if not np.any(logits.view(np.uint32) & 0xFFFF):
        dtype = "bfloat16"
    else:
        with np.errstate(over="ignore"):
            half = np.array_equal(logits.astype(np.float16).astype(np.float32), logits)
        dtype = "float16" if half else "float32"
    return rounding_step(logits.max(axis=1), dtype)


def kl_by_position(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return KL(p || q) by position (nats), shape (N,), from probabilities of K ids, (N, K)."""
    p, q = with_rest(p), with_rest(q)
    kl = np.sum(np.where(p > 0, p * (np.log(p + TINY) - np.log(q + TINY)), 0.0), axis=1)
    return np.maximum(kl, 0.0)


def with_rest(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities of the K ids and of all other ids together, shape (N, K+1)."""
    rest = np.clip(1.0 - p.sum(axis=1, keepdims=True), 0.0, 1.0)
    return np.concatenate([p, rest], axis=1)


@dataclass(frozen=True)
class FormatNoise:
    """KL (nats) and top-1 agreement of a model in float32 and in a 16-bit format.

    Ties of the 16-bit format agree.
    """

    mean_kl: float
    p95_kl: float
    median_kl: float
    top1_agreement: float

    def typical_kl(self, *, routed: bool) -> float:
        """Return the median for a mixture of experts, whose mean is held by ties of its routers."""
        return self.median_kl if routed else self.mean_kl


@dataclass(frozen=True)
class Fingerprint:
    """Log-probabilities of one model on the probes.

    A sequence of length T gives T-1 scored positions: position t predicts token t+1. N is the
    number of positions of all sequences together.
    """

    probes: tuple[tuple[int, ...], ...]
    ids: NDArray[np.int32]  # scored token ids, shape (N, K)
    logprobs: NDArray[np.float32]  # of those ids, shape (N, K)
    top1: NDArray[np.int32]  # the engine's own most likely token, shape (N,)
    engine: str  # "trainer", "deepspeed", "transformers", "vllm" or "server"
    # mean KL between two measurements by the same engine with different batching (nats)
    noise: float | None = None
    # distance of neighbouring numbers in the dtype of the logits, at the largest logit (nats),
    # shape (N,); without it only equal log-probabilities are ties
    steps: NDArray[np.float32] | None = None
    measured_on: Mapping[str, str] | None = None  # hardware and software of the engine
    # noise of each 16-bit format in which the model may be served, by torch dtype name; a format
    # that overflows is left out
    formats: Mapping[str, FormatNoise] = field(default_factory=dict)
    dtype: str | None = None  # torch name of the dtype of the computation
    routed: bool = False  # a mixture of experts

    @property
    def arithmetic(self) -> str:
        """Torch name of the dtype of the computation; inferred from the steps if unknown."""
        fine = self.steps is not None and bool(np.median(self.steps) < FINE)
        return self.dtype or ("float32" if fine else "bfloat16")

    @property
    def positions(self) -> int:
        """N, the number of scored positions."""
        return int(self.ids.shape[0])

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        # One metadata entry: safetensors writes several in random order, which changes the digest.
        names = ("engine", "noise", "probes", "measured_on", "dtype", "routed")
        facts = {name: getattr(self, name) for name in names}
        facts["formats"] = {name: asdict(noise) for name, noise in self.formats.items()}
        meta = {"fingerprint": json.dumps(facts)}
        arrays = {"ids": self.ids, "logprobs": self.logprobs, "top1": self.top1}
        if self.steps is not None:
            arrays["steps"] = self.steps
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path, metadata=meta)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of `save`. Raises one of `UNREADABLE` if it is not a fingerprint."""
        with safe_open(path, framework="numpy") as file:
            facts = json.loads(file.metadata()["fingerprint"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts["probes"] = tuple(map(tuple, facts["probes"]))
        facts["formats"] = {name: FormatNoise(**each) for name, each in facts["formats"].items()}
        return cls(**facts, **arrays)


@dataclass(frozen=True)
class ScorePrint:
    """Scores of one reward model on the probes, taken at the last token of each."""

    probes: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]  # raw outputs of the head, not normalised
    engine: str
    # mean absolute difference between two measurements with different batching, in scores
    noise: float | None = None
    measured_on: Mapping[str, str] | None = None  # hardware and software of the engine

    def save(self, path: Path) -> None:
        """Write JSON, which preserves every bit of a float32."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of `save`. Raises one of `UNREADABLE` if it has no scores."""
        facts = json.loads(path.read_text())
        facts["probes"] = tuple(tuple(map(int, probe)) for probe in facts["probes"])
        facts["scores"] = tuple(map(float, facts["scores"]))
        return cls(**facts)
