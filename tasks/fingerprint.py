"""Fingerprints: what a model does, and drift: how far two of them lie apart.

A fingerprint holds, for every scored position of a fixed set of probe token sequences, the
log-probabilities of K token ids. The first one (from the live training engine) chooses the ids: its
own K most likely tokens, or the whole vocabulary when that is no larger than K. Every later one is
taken *at the same ids*, so that two fingerprints are comparable whatever engine made them. What the
K ids leave over is kept as one rest bucket, which makes the KL a lower bound that is exact when
the vocabulary fits into K.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from tasks.errors import ArtifactError, DriftError
from tasks.reward_drift import RewardLimit

TOP_K = 512
"""Ids kept a position. A vocabulary of this size or smaller is covered whole."""

_TINY = 1e-12


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
    """

    probes: tuple[tuple[int, ...], ...]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top1: NDArray[np.int32]
    engine: str
    noise: float | None = None

    @property
    def positions(self) -> int:
        """N, the number of scored positions."""
        return int(self.ids.shape[0])

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        # One entry: safetensors writes several in random order, and then the same fingerprint
        # would have another digest every time.
        said = {"engine": self.engine, "noise": self.noise, "probes": self.probes}
        meta = {"fingerprint": json.dumps(said)}
        arrays = {"ids": self.ids, "logprobs": self.logprobs, "top1": self.top1}
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path, metadata=meta)

    @classmethod
    def load(cls, path: Path) -> Fingerprint:
        """Read what `save` wrote. Raises ArtifactError when the file is not a fingerprint."""
        try:
            with safe_open(path, framework="numpy") as file:
                meta = json.loads(file.metadata()["fingerprint"])
                arrays = {name: file.get_tensor(name) for name in ("ids", "logprobs", "top1")}
            return cls(
                probes=tuple(tuple(p) for p in meta["probes"]),
                engine=meta["engine"],
                noise=meta["noise"],
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
    """Distance of a fingerprint from its reference. KL in nats, reference first: KL(ref || new)."""

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
    """What a drift profile admits. Max KL is reported, never gated on: one odd position out of
    thousands moves it by orders of magnitude between two correct engines."""

    mean_kl: float
    p95_kl: float
    top1_agreement: float
    rewards: RewardLimit = field(default_factory=lambda: RewardLimit(difference=0.03, order=0.97))
    """Of a reward model, which has scores in place of log-probabilities."""


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


def drift(reference: Fingerprint, new: Fingerprint) -> Drift:
    """Distance of `new` from `reference`.

    Raises:
        DriftError: when they are not comparable (other probes or ids) or when one of them holds a
            value that is not finite.
    """
    if reference.probes != new.probes or not np.array_equal(reference.ids, new.ids):
        raise DriftError("fingerprints are not comparable: they score other tokens")
    for one in (reference, new):
        if np.isnan(one.logprobs).any() or (one.logprobs > 1e-3).any():
            raise DriftError(
                f"the {one.engine} fingerprint holds values that are no log-probability"
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
        top1_agreement=float((reference.top1 == new.top1).mean()),
        cosine=float(cosine.mean()),
    )


def within(measured: Drift, limit: DriftLimit, noise: float | None = None) -> list[str]:
    """What of `measured` exceeds `limit`; empty when it holds.

    With `noise`, mean KL must also stay within twice the engine's own repeat noise.
    """
    found: list[str] = []
    if measured.mean_kl > limit.mean_kl:
        found.append(f"mean KL {measured.mean_kl:.2e} > {limit.mean_kl:.0e}")
    if measured.p95_kl > limit.p95_kl:
        found.append(f"p95 KL {measured.p95_kl:.2e} > {limit.p95_kl:.0e}")
    if measured.top1_agreement < limit.top1_agreement:
        found.append(f"top-1 agreement {measured.top1_agreement:.4f} < {limit.top1_agreement}")
    if noise is not None and measured.mean_kl > 2 * noise:
        found.append(f"mean KL {measured.mean_kl:.2e} > twice the repeat noise {noise:.2e}")
    return found
