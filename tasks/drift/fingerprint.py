"""Fingerprints of models, and drift: the distance between two fingerprints.

A fingerprint holds, for every scored position of a fixed set of probe token sequences, the
log-probabilities (nats) of K token ids. The first one (from the live training engine) chooses the
ids: its own K most likely tokens, or the whole vocabulary when that is no larger than K. Every
later one is taken *at the same ids*, so two fingerprints are comparable whatever engine made them.
Everything outside the K ids is one rest bucket: the KL is a lower bound, exact when the vocabulary
fits into K.

Top-1 agreement counts the token, not its index in a tie. Engines round logits to their dtype: one
step of bf16 is 0.125 between 16 and 32. Two engines round each of two logits by at most half a
step, so a difference of less than `TIE_STEPS` = 2 steps (same unit as logits and log-probabilities:
nats) may have either sign in a correct engine. The new engine's top token therefore *agrees* if the
reference gives it a log-probability less than two steps below its maximum; the steps are those of
the reference's dtype at its largest logit, measured with it and stored in it (`steps`). The new
engine has no say in that tolerance. Two logits that are equal are a tie in every dtype.

Probes share their first tokens (the chat template), and equal contexts have equal distributions: a
tie behind the template's last token would count once per probe. So agreement is a share of distinct
contexts, not of positions. KL is a mean over positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from tasks.core.errors import ArtifactError, DriftError
from tasks.drift.reward_drift import RewardLimit

TOP_K = 512
"""Ids kept a position. A vocabulary of this size or smaller is covered whole."""

TIE_STEPS = 2.0
"""Two logits that differ by less than this many rounding steps are tied; see the module's text."""

_TINY = 1e-12
_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Significant bits by dtype (torch name)."""


def rounding_step(logits: NDArray[Any] | float, dtype: str = "bfloat16") -> NDArray[np.float32]:
    """Distance of neighbouring numbers of a dtype at these magnitudes, in the logits' unit (nats).

    Args:
        logits: any shape.
        dtype: torch name of the dtype in which they were computed.
    """
    values = np.asarray(logits, np.float64)
    exponents = np.frexp(np.abs(values))[1] - _PRECISION[dtype]
    steps: NDArray[np.float32] = np.where(values == 0, 2.0**-133, np.ldexp(1.0, exponents))
    return steps.astype(np.float32)


def largest_steps(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `Fingerprint.steps` of some positions.

    The dtype is that of the values, not of the array: engines return bf16 logits as fp32, too.

    Args:
        logits: of the whole vocabulary, shape (N, V).
    """
    if not np.any(logits.view(np.uint32) & 0xFFFF):
        dtype = "bfloat16"
    else:
        with np.errstate(over="ignore"):
            half = np.array_equal(logits.astype(np.float16).astype(np.float32), logits)
        dtype = "float16" if half else "float32"
    return rounding_step(logits.max(axis=1), dtype)


@dataclass(frozen=True)
class Fingerprint:
    """Log-probabilities of one model on the probes.

    Attributes:
        probes: P token-id sequences. Sequence p of length T gives T-1 scored positions: position t
            predicts token t+1. N is the number of positions of all sequences together.
        ids: token ids that were scored, shape (N, K), int32.
        logprobs: natural-log probabilities of those ids, shape (N, K), float32.
        top1: the engine's own most likely token, shape (N,), int32.
        engine: who measured it ("deepspeed", "transformers", "vllm").
        noise: mean KL between two measurements of the same model by the same engine with different
            batching (nats); None where it was not measured.
        steps: distance of neighbouring numbers in the dtype of the logits, at the largest logit
            (nats), shape (N,), float32; None in files that do not have it, and from engines that
            do not return logits. Without it only equal log-probabilities are ties.
        measured_on: `machine.measured_on` of the engine; None where it is not known.
    """

    probes: tuple[tuple[int, ...], ...]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top1: NDArray[np.int32]
    engine: str
    noise: float | None = None
    steps: NDArray[np.float32] | None = None
    measured_on: Mapping[str, str] | None = None

    @property
    def positions(self) -> int:
        """N, the number of scored positions."""
        return int(self.ids.shape[0])

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        # One entry: safetensors writes several in random order, and then the same fingerprint
        # would have another digest every time.
        names = ("engine", "noise", "probes", "measured_on")
        meta = {"fingerprint": json.dumps({name: getattr(self, name) for name in names})}
        arrays = {"ids": self.ids, "logprobs": self.logprobs, "top1": self.top1}
        if self.steps is not None:
            arrays["steps"] = self.steps
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path, metadata=meta)

    @classmethod
    def load(cls, path: Path) -> Fingerprint:
        """Read what `save` wrote. Raises ArtifactError when the file is not a fingerprint."""
        try:
            with safe_open(path, framework="numpy") as file:
                meta = json.loads(file.metadata()["fingerprint"])
                names = ("ids", "logprobs", "top1", *({"steps"} & set(file.keys())))
                arrays = {name: file.get_tensor(name) for name in names}
            return cls(
                probes=tuple(tuple(p) for p in meta["probes"]),
                engine=meta["engine"],
                noise=meta["noise"],
                measured_on=meta.get("measured_on"),
                **arrays,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is not a readable fingerprint: {error}") from error
        except Exception as error:  # safetensors raises its own class, with no common base
            if type(error).__name__ != "SafetensorError":
                raise
            raise ArtifactError(f"{path} is not a readable fingerprint: {error}") from error


@dataclass(frozen=True)
class Drift:
    """Distance of a fingerprint from its reference. KL in nats, reference first: KL(ref || new).

    `top1_agreement` is the share of distinct contexts in which the tokens agree, ties included.
    """

    mean_kl: float
    p95_kl: float
    max_kl: float
    top1_agreement: float
    cosine: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for manifests and trackers."""
        return asdict(self)


@dataclass(frozen=True)
class DriftLimit:
    """Limits of a drift profile. Max KL is reported, never gated on: one odd position out of
    thousands moves it by orders of magnitude between two correct engines."""

    mean_kl: float
    p95_kl: float
    top1_agreement: float
    rewards: RewardLimit = field(default_factory=lambda: RewardLimit(difference=0.03, order=0.97))
    """Limits of a reward model, which has scores in place of log-probabilities."""


PROFILES = {
    "strict": DriftLimit(
        mean_kl=1e-4,
        p95_kl=5e-4,
        top1_agreement=0.99,
        rewards=RewardLimit(difference=0.01, order=0.99),
    ),
    "standard": DriftLimit(mean_kl=1e-3, p95_kl=5e-3, top1_agreement=0.97),
    "relaxed": DriftLimit(
        mean_kl=1e-2,
        p95_kl=5e-2,
        top1_agreement=0.95,
        rewards=RewardLimit(difference=0.1, order=0.95),
    ),
}

EXACT = DriftLimit(
    mean_kl=1e-5, p95_kl=1e-4, top1_agreement=0.99, rewards=RewardLimit(difference=1e-3, order=0.99)
)
"""For hand-offs that change no number, only where it is stored: trained -> gathered."""


def _with_rest(logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probabilities of the K ids and of everything else, shape (N, K+1)."""
    p = np.exp(logprobs.astype(np.float64))
    rest = np.clip(1.0 - p.sum(axis=1, keepdims=True), 0.0, 1.0)
    return np.concatenate([p, rest], axis=1)


def agreeing(reference: Fingerprint, new: Fingerprint) -> NDArray[np.bool_]:
    """Return, by position, True if the reference gives `new`'s top token its own maximum.

    Within rounding: see the module's text. A token outside the reference's ids never agrees, unless
    it is the reference's own top token.

    Returns:
        shape (N,).
    """
    best = reference.logprobs.max(axis=1)
    at_id = np.where(reference.ids == new.top1[:, None], reference.logprobs, -np.inf).max(axis=1)
    behind = best - at_id
    tied = behind == 0
    if reference.steps is not None:
        tied |= behind < TIE_STEPS * reference.steps
    return tied | (reference.top1 == new.top1)


def _by_context(probes: Sequence[Sequence[int]], agree: NDArray[np.bool_]) -> float:
    """Mean over distinct contexts (the tokens before a position) of the mean over their positions.

    Args:
        probes: as in `Fingerprint`.
        agree: shape (N,).
    """
    numbers: dict[tuple[int, ...], int] = {}
    contexts = [
        numbers.setdefault(tuple(probe[:end]), len(numbers))
        for probe in probes
        for end in range(1, len(probe))
    ]
    return float((np.bincount(contexts, weights=agree) / np.bincount(contexts)).mean())


def drift(reference: Fingerprint, new: Fingerprint) -> Drift:
    """Return the distance of `new` from `reference`.

    Raises:
        DriftError: they are not comparable (other probes or ids), or one of them holds a value
            that is not finite.
    """
    if reference.probes != new.probes or not np.array_equal(reference.ids, new.ids):
        raise DriftError("fingerprints are not comparable: they score other tokens")
    for side in (reference, new):
        if np.isnan(side.logprobs).any() or (side.logprobs > 1e-3).any():
            raise DriftError(
                f"the {side.engine} fingerprint holds values that are not log-probabilities"
            )
    p, q = _with_rest(reference.logprobs), _with_rest(new.logprobs)
    kl = np.sum(np.where(p > 0, p * (np.log(p + _TINY) - np.log(q + _TINY)), 0.0), axis=1)
    kl = np.maximum(kl, 0.0)
    norms = np.linalg.norm(p, axis=1) * np.linalg.norm(q, axis=1)
    cosine = np.sum(p * q, axis=1) / np.maximum(norms, _TINY)
    return Drift(
        mean_kl=float(kl.mean()),
        p95_kl=float(np.quantile(kl, 0.95)),
        max_kl=float(kl.max()),
        top1_agreement=_by_context(reference.probes, agreeing(reference, new)),
        cosine=float(cosine.mean()),
    )


def within(measured: Drift, limit: DriftLimit, noise: float | None = None) -> list[str]:
    """Return the limits that `measured` exceeds, one text each; empty if it is within all.

    With `noise`, mean KL must also stay within twice the engine's own repeat noise.
    """
    exceeded: list[str] = []
    if measured.mean_kl > limit.mean_kl:
        exceeded.append(f"mean KL {measured.mean_kl:.2e} > {limit.mean_kl:.0e}")
    if measured.p95_kl > limit.p95_kl:
        exceeded.append(f"p95 KL {measured.p95_kl:.2e} > {limit.p95_kl:.0e}")
    if measured.top1_agreement < limit.top1_agreement:
        exceeded.append(f"top-1 agreement {measured.top1_agreement:.4f} < {limit.top1_agreement}")
    if noise is not None and measured.mean_kl > 2 * noise:
        exceeded.append(f"mean KL {measured.mean_kl:.2e} > twice the repeat noise {noise:.2e}")
    return exceeded
