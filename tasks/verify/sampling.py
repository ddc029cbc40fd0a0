"""Compare a server's default temperature, top-k, top-p and min-p with the recorded ones.

First tokens after some prompts are sampled without any parameter. Under the recorded settings the
mean and the variance of their surprisal are known: the check is a z-test.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.core.report import Cause, Row
from tasks.verify.compare import Asked, kl_of
from tasks.verify.reference import Reference
from tasks.verify.server import ServerError, UnsupportedError, parallel

PROMPTS, ROUNDS, EACH = 16, 4, 16
"""Prompts, requests for each, and tokens that are sampled in a request."""
FEWEST = 128
"""Tokens below which their mean is no normal variable."""
SECONDS = 60.0
"""Time after which a slow server gets no further request."""
DOUBT = 5.0
"""Standard deviations that refuse the recorded settings."""
SLACK = 0.02
"""Surprisal (nats per token) that rounding costs at the edge of a cut-off."""
COARSE = 0.7
"""A factor of the temperature that every user would notice."""
_SAME = 6.0
"""KL (nats) over all tokens above which the server's log-probabilities are others."""


@dataclass(frozen=True)
class Settings:
    """Sampling settings; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in vars(self).items())

    def probabilities(self, logp: NDArray[Any]) -> NDArray[Any]:
        """Return the probabilities of sampling ids, and of all others as the last, shape (K+1,).

        `logp` is at temperature 1, the most likely first, shape (K,). The probability of all others
        is exact there, or if they are cut off.
        """
        heat = max(self.temperature, 0.02)
        rest = max(0.0, 1 - float(np.exp(logp).sum())) if heat >= 1 else 0.0
        p = np.append(np.exp((logp - logp[0]) / heat), rest * np.exp(-logp[0]))
        p[self.top_k or len(p) :] = 0.0
        p /= p.sum()
        before = np.cumsum(p) - p
        p[-1] = max(0.0, min(p[-1], self.top_p - before[-1]))
        p[:-1][before[:-1] >= self.top_p] = 0.0
        p[np.append(p[:-1], p[-2]) < self.min_p * p[0]] = 0.0
        return p / p.sum()

    def moments(self, logp: NDArray[Any], usable: NDArray[Any]) -> tuple[float, float]:
        """Return mean and variance of the surprisal (nats) of a sampled token that is usable.

        The surprisal of other ids is that of the last one; `usable` has shape (K+1,).
        """
        p, surprisal = self.probabilities(logp) * usable, -np.append(logp, logp[-1])
        if not p.sum():
            return 0.0, 0.0
        mean = float(p @ surprisal / p.sum())
        return mean, float(p @ surprisal**2 / p.sum()) - mean**2

    def is_exact(self, logp: NDArray[Any]) -> bool:
        """Return True if the probability of all other ids is exact."""
        return self.temperature == 1 or self.probabilities(logp)[-2] == 0


_DEFAULTS = Settings(1.0, 50)
"""Defaults of transformers. ms-swift writes them into the live model and no file: nobody's choice,
so that a server with them and one without are both as recorded."""


class Sampled(NamedTuple):
    """Tokens that were sampled after one prompt, as counts by id of the reference.

    Ids of the prompt, which penalties change, and EOS, which servers may leave out, are not usable.
    """

    logp: NDArray[Any]  # at temperature 1, the most likely first, shape (K,)
    counts: NDArray[Any]  # the last is of all other ids, shape (K+1,)
    usable: NDArray[Any]  # the same shape


def sampling(asked: Asked) -> Row:
    """Compare the server's default sampling settings with those that training recorded."""
    name, recorded = "sampling", expected_settings(asked.reference)
    places, kl = _places(asked, recorded)
    until = time.monotonic() + SECONDS
    made = parallel(lambda row: _sample(asked, row, until), places * ROUNDS, 4)
    rows = [sampled for sampled in made if sampled is not None]
    candidates = (recorded, Settings()) if recorded == _DEFAULTS else (recorded,)
    tests = [(surprisal_of(rows, settings), settings) for settings in candidates]
    test, settings = min(tests, key=lambda test: abs(test[0].excess))
    count, mean, excess, deviation = test
    late, slow = len(made) - len(rows), ""
    if late:
        slow = f" ({late} of {len(made)} requests left out: the server is slow)"
    sizes = {"samples": float(count), "left_out": float(late)}
    if count < FEWEST:
        return Row(name, "unknown", f"{count} sampled tokens are too few{slow}", sizes)
    # Rounding of the server's logits moves a mean by at most sqrt(2 KL) standard deviations.
    doubt = DOUBT + (2 * kl * count) ** 0.5 / max(settings.temperature, 0.02)
    allowed = doubt * deviation + SLACK
    numbers = {
        "z": excess / max(deviation, 1e-9),
        "surprisal": mean + excess,
        "excess": excess,
        **sizes,
    }
    seen = (
        f"{count} tokens, sampled without parameters{slow}, have a surprisal of "
        f"{mean + excess:.2f} nats, expected {mean:.2f} +- {allowed:.2f}"
    )
    if abs(excess) > allowed:
        how = "a higher temperature" if excess > 0 else "a lower temperature or a cut-off"
        text = f"{seen}: {how}; training recorded {recorded}"
        cause = Cause(
            "default-temperature",
            "the server's defaults override the recorded ones: those of the engine or of "
            "generation_config.json",
            f"send temperature, top_k and top_p with every request ({recorded}); or start vLLM "
            "with the trained folder's generation_config.json, or with none (--generation-config "
            "vllm); llama-server with --temp, --top-k, --top-p and --min-p, it has its own",
        )
        return Row(name, "fault", text, numbers, (cause,), {"excess": allowed})
    heat = settings.temperature  # beside one that every user would tell from it
    other = replace(settings, temperature=heat * COARSE if heat > 1 - COARSE else heat + 1 - COARSE)
    if abs(surprisal_of(rows, other, settings).mean - mean) < allowed + 2 * deviation:
        return Row(name, "unknown", f"{seen}: they do not tell temperatures apart here", numbers)
    return Row(name, "ok", f"{seen}, as recorded", numbers, limit={"excess": allowed})


class Surprisal(NamedTuple):
    """Surprisal of sampled tokens (nats per token): expected, above it, its standard deviation."""

    tokens: int
    mean: float
    excess: float
    deviation: float


def surprisal_of(
    rows: Sequence[Sampled], settings: Settings, counted: Settings | None = None
) -> Surprisal:
    """Compare the surprisal of sampled tokens with that under some settings.

    `counted` are the settings that decide whether other ids count; None for the same.
    """
    count, seen, mean, variance = 0, 0.0, 0.0, 0.0
    for logp, counts, usable in rows:
        usable = np.append(usable[:-1], (counted or settings).is_exact(logp))
        counts, moments = counts * usable, settings.moments(logp, usable)
        number = int(counts.sum())
        count += number
        seen -= counts @ np.append(logp, logp[-1])
        mean += number * moments[0]
        variance += number * moments[1]
    share = 1 / max(count, 1)
    return Surprisal(count, mean * share, (seen - mean) * share, max(variance, 0.0) ** 0.5 * share)


def expected_settings(reference: Reference) -> Settings:
    """Return the settings of the recorded generation configuration, as vLLM reads it."""
    recorded = reference.token_settings("generation_config")
    values = {name: recorded.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    stated = {name: value for name, value in values.items() if value is not None}
    stated["top_k"] = max(0, stated.get("top_k", 0))  # -1 is all of them
    return Settings(**{**stated, "top_p": stated.get("top_p") or 1.0})


def _places(asked: Asked, settings: Settings) -> tuple[list[int], float]:
    """Return the positions whose token tells most, two of a probe, and the mean KL there (nats)."""
    reference, served = asked.reference, asked.aligned(asked.model)
    sizes = [len(ids) - 1 for ids in reference.sequences]
    owner: NDArray[Any] = np.repeat(np.arange(len(sizes)), sizes)
    trained = np.sort(reference.trained.logprobs.astype(np.float64), axis=1)[:, ::-1]
    spread = [settings.moments(row, np.ones(len(row) + 1))[1] for row in trained]
    usable = served.measured & np.array([len(ids) > 1 for ids in reference.prefixes])
    chosen: list[int] = []
    for row in np.argsort(np.where(usable, -np.array(spread), 0.0)).tolist():
        if usable[row] and spread[row] > 0 and (owner[chosen] == owner[row]).sum() < 2:
            chosen.append(row)
    chosen = chosen[:PROMPTS]
    if not chosen:
        raise UnsupportedError("no prompt whose next token is uncertain")
    kl = float(np.mean(kl_of(reference.trained, served)[chosen]))
    if kl * PROMPTS * ROUNDS * EACH > _SAME:
        raise UnsupportedError(
            f"sampling not measured: the server's log-probabilities are others (KL {kl:.1e})"
        )
    return chosen, kl


def _sample(asked: Asked, row: int, until: float) -> Sampled | None:
    """Sample tokens at a position; None if it is too late, or the server too slow."""
    if time.monotonic() > until:
        return None
    reference, prompt = asked.reference, asked.reference.prefixes[row]
    try:
        responses = asked.server.generate(asked.model, prompt, 1, n=EACH)
    except ServerError as error:
        if error.code == "busy":
            return None
        raise
    if any(response.ids is None for response in responses):
        raise UnsupportedError("the server does not tell the ids of its tokens")
    tokens = [response.ids[0] for response in responses if response.ids]
    logp = reference.trained.logprobs[row].astype(np.float64)
    order = np.argsort(-logp)
    ids = reference.trained.ids[row][order]
    left_out = {*prompt, *reference.every_end}
    usable = np.append(~np.isin(ids, [*left_out]), True)
    others = sum(token not in left_out and token not in ids for token in tokens)
    counts = np.array([*(tokens.count(token) for token in ids), others])
    return Sampled(logp[order], counts * usable, usable)
