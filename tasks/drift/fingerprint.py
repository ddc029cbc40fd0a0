"""Fingerprints of models, and drift: the distance between two fingerprints.

A fingerprint has, for every scored position of a fixed set of probe token sequences, the
log-probabilities (nats) of K token ids. The first fingerprint (of the live training engine) chooses
the ids: its K most likely tokens, or the whole vocabulary if that is not larger than K. Every later
one is taken *at the same ids*, so any two fingerprints are comparable. All other ids form one rest
bucket: the KL is a lower bound, and exact if the vocabulary fits into K.

Top-1 agreement allows for ties. Engines round logits to their dtype: one step of bf16 is 0.125
between 16 and 32. Two engines round each of two logits by at most half a step, so a difference of
less than `TIE_STEPS` = 2 steps (in nats, as logits and log-probabilities) may have either sign in a
correct engine. The new engine's top token therefore *agrees* if the reference gives it a
log-probability less than two steps below its maximum. The steps are those of the reference's dtype
at its largest logit and are stored with it (`steps`), or those of a coarser dtype that the caller
names because the new engine is known to compute in it; the new engine does not influence them.
Equal logits are a tie in every dtype.

Probes share their first tokens (the chat template), and equal contexts have equal distributions: a
tie after the template's last token would count once per probe. So agreement is a share of distinct
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
"""Ids per position. A vocabulary of this size or smaller is covered completely."""

TIE_STEPS = 2.0
"""Logits that differ by less than this many rounding steps are tied; see the module docstring."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that give the number of experts."""

_TINY = 1e-12
_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Significant bits by dtype (torch name)."""
_FINE = 2.0**-14
"""A rounding step below this is of 32-bit logits."""


def rounding_step(logits: NDArray[Any] | float, dtype: str = "bfloat16") -> NDArray[np.float32]:
    """Return the distance of neighbouring numbers of a dtype at these magnitudes, in nats.

    Args:
        logits: any shape.
        dtype: torch name of the dtype in which the logits were computed.

    Returns:
        Array of the same shape.
    """
    values = np.asarray(logits, np.float64)
    exponents = np.frexp(np.abs(values))[1] - _PRECISION[dtype]
    steps: NDArray[np.float32] = np.where(values == 0, 2.0**-133, np.ldexp(1.0, exponents))
    return steps.astype(np.float32)


def largest_steps(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `Fingerprint.steps` of N positions, shape (N,).

    The dtype is inferred from the values, since engines return bf16 logits in fp32 arrays.

    Args:
        logits: logits of the whole vocabulary, shape (N, V).
    """
    if not np.any(logits.view(np.uint32) & 0xFFFF):
        dtype = "bfloat16"
    else:
        with np.errstate(over="ignore"):
            half = np.array_equal(logits.astype(np.float16).astype(np.float32), logits)
        dtype = "float16" if half else "float32"
    return rounding_step(logits.max(axis=1), dtype)


@dataclass(frozen=True)
class FormatNoise:
    """Distance between a model computed in float32 and in a 16-bit format: weights, probes equal.

    Attributes:
        mean_kl: mean of KL(float32 || 16 bits) over positions, in nats.
        p95_kl: its 95th percentile.
        median_kl: its median.
        top1_agreement: top-1 agreement, ties of the 16-bit format included.
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

    Attributes:
        probes: P token-id sequences. Sequence p of length T gives T-1 scored positions: position t
            predicts token t+1. N is the number of positions of all sequences together.
        ids: scored token ids, shape (N, K), int32.
        logprobs: natural-log probabilities of those ids, shape (N, K), float32.
        top1: the engine's own most likely token, shape (N,), int32.
        engine: engine that measured it ("deepspeed", "transformers", "vllm").
        noise: mean KL between two measurements of the same model by the same engine with different
            batching (nats); None if it was not measured.
        steps: distance of neighbouring numbers in the dtype of the logits, at the largest logit
            (nats), shape (N,), float32; None in older files and from engines that do not return
            logits. Without it only equal log-probabilities are ties.
        measured_on: `machine.measured_on` of the engine; None if unknown.
        formats: noise of each 16-bit format in which the model may be served, by torch dtype name;
            empty if it was not measured. A format that overflows is left out.
        dtype: torch name of the dtype that the model was computed in; None if unknown.
        routed: True for a mixture of experts.
    """

    probes: tuple[tuple[int, ...], ...]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top1: NDArray[np.int32]
    engine: str
    noise: float | None = None
    steps: NDArray[np.float32] | None = None
    measured_on: Mapping[str, str] | None = None
    formats: Mapping[str, FormatNoise] = field(default_factory=dict)
    dtype: str | None = None
    routed: bool = False

    @property
    def arithmetic(self) -> str:
        """Torch name of the dtype of the computation; inferred from the steps if unknown."""
        fine = self.steps is not None and bool(np.median(self.steps) < _FINE)
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
    def load(cls, path: Path) -> Fingerprint:
        """Read a file of `save`. Raises ArtifactError if it is not a fingerprint."""
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
                formats={n: FormatNoise(**each) for n, each in meta.get("formats", {}).items()},
                dtype=meta.get("dtype"),
                routed=meta.get("routed", False),
                **arrays,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is not a readable fingerprint: {error}") from error
        except Exception as error:  # safetensors' error class has no public base
            if type(error).__name__ != "SafetensorError":
                raise
            raise ArtifactError(f"{path} is not a readable fingerprint: {error}") from error


_FLAT = 1e-5
"""Log-probabilities closer than this are equal, in nats: ten times the noise of float32. The least
difference of models initialised at random (hidden size 8, std 0.02) is 1,000 times as large."""
_HEAD, _FEWEST = 16, 8


def require_informative(measured: Fingerprint, what: str) -> None:
    """Raise DriftError if the distribution is uniform, or does not depend on the context.

    Any broken model would agree with such a reference.

    Args:
        measured: the reference.
        what: the model or file, for the error.
    """
    rows = -np.sort(-measured.logprobs, axis=1)
    if rows.shape[1] > 1 and (rows[:, 0] - rows[:, -1]).max() < _FLAT:
        reason = "every token has the same probability at every position"
    elif measured.positions >= _FEWEST and np.ptp(rows[:, :_HEAD], axis=0).max() < _FLAT:
        reason = "the probabilities are the same at every position, whatever the text"
    elif _of_last_token(measured, rows[:, :_HEAD]):
        reason = "the probabilities depend on the last token alone, not on the text before it"
    else:
        return
    raise DriftError(
        f"{what} is no reference: {reason}; matrices of the base may be zero",
        hint="python flows/audit.py source=<the base> values=true",
    )


def _of_last_token(measured: Fingerprint, rows: NDArray[np.float32]) -> bool:
    """Return True if all contexts that end with the same token have the same distribution."""
    places = [(probe, end) for probe in measured.probes for end in range(1, len(probe))]
    groups: dict[int, dict[tuple[int, ...], int]] = {}
    for number, (probe, end) in enumerate(places):
        groups.setdefault(probe[end - 1], {}).setdefault(probe[:end], number)
    several = [list(group.values()) for group in groups.values() if len(group) > 1]
    if sum(len(numbers) - 1 for numbers in several) < _FEWEST:
        return False
    return all(np.ptp(rows[numbers], axis=0).max() < _FLAT for numbers in several)


@dataclass(frozen=True)
class Drift:
    """Distance of a fingerprint from its reference.

    Attributes:
        mean_kl: mean of KL(reference || new) over positions, in nats.
        p95_kl: its 95th percentile.
        max_kl: its maximum.
        top1_agreement: share of distinct contexts in which the top tokens agree, ties included.
        cosine: mean cosine similarity of the probabilities.
        median_kl: median of the KL, in nats.
    """

    mean_kl: float
    p95_kl: float
    max_kl: float
    top1_agreement: float
    cosine: float
    median_kl: float = 0.0

    @property
    def noise(self) -> FormatNoise:
        """The same as the noise of a format."""
        return FormatNoise(self.mean_kl, self.p95_kl, self.median_kl, self.top1_agreement)


@dataclass(frozen=True)
class DriftLimit:
    """Limits of a drift profile.

    Max KL has no limit: between two correct engines a single position can change it by orders of
    magnitude.

    Attributes:
        mean_kl: highest mean KL, in nats.
        p95_kl: highest 95th percentile of the KL, in nats.
        top1_agreement: lowest top-1 agreement.
        rewards: limits for a reward model, which has scores instead of log-probabilities.
        kept: least share of an adapter's update that a merge has to keep.
        share: largest distance of the share of an adapter that answers from 1.
        by_median: True for a mixture of experts, whose mean is held by the few positions where
            equal routers choose other experts: `mean_kl` then is the limit of the median.
        measured: what widened the limits; empty for those of the profile.
    """

    mean_kl: float
    p95_kl: float
    top1_agreement: float
    rewards: RewardLimit = field(default_factory=lambda: RewardLimit(difference=0.03, order=0.97))
    kept: float = 0.9
    share: float = 0.1
    by_median: bool = False
    measured: str = ""


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
        share=0.5,
        rewards=RewardLimit(difference=0.1, order=0.95),
        kept=0.0,
    ),
}

QUANTIZED = {
    "int8": DriftLimit(mean_kl=1e-2, p95_kl=5e-2, top1_agreement=0.95, share=0.5),
    "fp8": DriftLimit(mean_kl=2e-2, p95_kl=1e-1, top1_agreement=0.92, share=0.5),
    "int4": DriftLimit(mean_kl=1e-1, p95_kl=5e-1, top1_agreement=0.85, share=0.5),
}
"""Limits for `convert.quantize`, by number format: first values, from the small models in
docs/delivery.md."""
_FORMATS = {
    "w8a8": "int8", "fp8": "fp8", "w4a16": "int4",
    "gguf:f16": "standard", "gguf:bf16": "standard", "gguf:q8_0": "int8", "gguf:q6_k": "int8",
    "gguf:q5_k_m": "fp8", "gguf:q4_k_m": "int4",
}  # fmt: skip


def quantized_profile(scheme: str, name: str = "auto") -> DriftLimit:
    """Return the drift that a quantised model may have.

    Args:
        scheme: `convert.quantize`.
        name: `convert.quantize_profile`.
    """
    profiles = {**PROFILES, **QUANTIZED}
    return profiles[_FORMATS[scheme] if name == "auto" else name]


EXACT = DriftLimit(
    mean_kl=1e-5, p95_kl=1e-4, top1_agreement=0.99, rewards=RewardLimit(difference=1e-3, order=0.99)
)
"""Limits for hand-offs that change no number, only the files: trained -> gathered."""


def _with_rest(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities of the K ids and of all other ids together, shape (N, K+1)."""
    rest = np.clip(1.0 - p.sum(axis=1, keepdims=True), 0.0, 1.0)
    return np.concatenate([p, rest], axis=1)


def steps_in(reference: Fingerprint, dtype: str | None) -> NDArray[np.float64] | None:
    """Return the rounding steps at the largest logits (nats), shape (N,); None if unknown.

    Args:
        reference: the fingerprint.
        dtype: torch name; if it is coarser than the reference's own dtype, its steps are returned.
    """
    if reference.steps is None:
        return None
    steps = reference.steps.astype(np.float64)
    if dtype is None:
        return steps
    bits = _PRECISION[reference.arithmetic] - _PRECISION[dtype]
    return steps * 2.0**bits if np.median(steps) < _FINE and bits > 0 else steps


def agreeing(
    reference: Fingerprint, new: Fingerprint, dtype: str | None = None
) -> NDArray[np.bool_]:
    """Return, for each position, True if the top tokens agree within rounding; shape (N,).

    The module docstring has the rule. A token outside the reference's ids never agrees, unless it
    is the reference's own top token.

    Args:
        reference: the fingerprint to compare with.
        new: the other one.
        dtype: torch name of the dtype that the new engine is known to compute in.
    """
    best = reference.logprobs.max(axis=1)
    at_id = np.where(reference.ids == new.top1[:, None], reference.logprobs, -np.inf).max(axis=1)
    behind = best - at_id
    tied = behind == 0
    if (steps := steps_in(reference, dtype)) is not None:
        tied |= behind < TIE_STEPS * steps
    return tied | (reference.top1 == new.top1)


def by_context(
    probes: Sequence[Sequence[int]],
    agree: NDArray[np.bool_],
    measured: NDArray[np.bool_] | None = None,
) -> float:
    """Return the share of distinct contexts that agree; NaN if no position was measured.

    The context of a position is the tokens before it. A context with several positions counts with
    their mean.

    Args:
        probes: as in `Fingerprint`.
        agree: one value per position, shape (N,).
        measured: True at the positions that count, shape (N,); None for all.
    """
    known = np.ones(len(agree), bool) if measured is None else measured
    if not known.any():
        return float("nan")
    numbers: dict[tuple[int, ...], int] = {}
    contexts = np.array(
        [
            numbers.setdefault(tuple(probe[:end]), len(numbers))
            for probe in probes
            for end in range(1, len(probe))
        ]
    )[known]
    count = np.bincount(contexts)
    agreeing = np.bincount(contexts, weights=agree[known])
    return float((agreeing[count > 0] / count[count > 0]).mean())


def kl_by_position(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return KL(p || q) by position (nats), shape (N,), from probabilities of K ids, shape (N, K).

    All other ids are one rest bucket.
    """
    p, q = _with_rest(p), _with_rest(q)
    kl = np.sum(np.where(p > 0, p * (np.log(p + _TINY) - np.log(q + _TINY)), 0.0), axis=1)
    return np.maximum(kl, 0.0)


def drift(reference: Fingerprint, new: Fingerprint, dtype: str | None = None) -> Drift:
    """Return the distance of `new` from `reference`; `dtype` as in `agreeing`.

    Raises:
        DriftError: they have different probes or ids, or one of them has values that are not
            log-probabilities.
    """
    if reference.probes != new.probes or not np.array_equal(reference.ids, new.ids):
        raise DriftError("fingerprints are not comparable: they score other tokens")
    for side in (reference, new):
        if np.isnan(side.logprobs).any() or (side.logprobs > 1e-3).any():
            raise DriftError(
                f"the {side.engine} fingerprint holds values that are not log-probabilities"
            )
    p, q = (np.exp(side.logprobs.astype(np.float64)) for side in (reference, new))
    kl = kl_by_position(p, q)
    p, q = _with_rest(p), _with_rest(q)
    norms = np.linalg.norm(p, axis=1) * np.linalg.norm(q, axis=1)
    cosine = np.sum(p * q, axis=1) / np.maximum(norms, _TINY)
    return Drift(
        mean_kl=float(kl.mean()),
        p95_kl=float(np.quantile(kl, 0.95)),
        max_kl=float(kl.max()),
        top1_agreement=by_context(reference.probes, agreeing(reference, new, dtype)),
        cosine=float(cosine.mean()),
        median_kl=float(np.median(kl)),
    )


def as_limit(kl: float) -> str:
    """Return a limit as text, such as "1e-03" or "7.8e-03"."""
    return f"{kl:.1e}".replace(".0e", "e")


def typical_kl(measured: Drift, limit: DriftLimit) -> tuple[str, float]:
    """Return name and value of the KL that `limit.mean_kl` limits."""
    return ("median KL", measured.median_kl) if limit.by_median else ("mean KL", measured.mean_kl)


def within(measured: Drift, limit: DriftLimit, noise: float | None = None) -> list[str]:
    """Return one text for each limit that a drift exceeds; empty if it is within all limits.

    Args:
        measured: the drift.
        limit: its limits.
        noise: repeat noise of the engine in nats; mean KL must then stay within twice of it.
    """
    exceeded: list[str] = []
    name, kl = typical_kl(measured, limit)
    if kl > limit.mean_kl:
        exceeded.append(f"{name} {kl:.2e} > {as_limit(limit.mean_kl)}")
    if measured.p95_kl > limit.p95_kl:
        exceeded.append(f"p95 KL {measured.p95_kl:.2e} > {as_limit(limit.p95_kl)}")
    if measured.top1_agreement < limit.top1_agreement:
        exceeded.append(f"top-1 agreement {measured.top1_agreement:.4f} < {limit.top1_agreement:g}")
    if noise is not None and measured.mean_kl > 2 * noise:
        exceeded.append(f"mean KL {measured.mean_kl:.2e} > twice the repeat noise {noise:.2e}")
    return exceeded
