"""Compare a server's default temperature, top-k, top-p and min-p with the recorded ones.

A server may take them from `generation_config.json`, or have its own. First tokens after some
prompts are sampled without any parameter. Under the recorded settings the mean and the variance of
their surprisal are known: the check is a z-test. A second one counts the least likely tokens, which
top-k, top-p and min-p leave out while the mean hardly moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.comparison import coarse_kl
from tasks.verify.reference import Reference
from tasks.verify.servers.server import ServerError, UnsupportedError

NAME = "sampling"
PROMPTS, ROUNDS = 16, (12, 13, 13, 13, 13)
"""Prompts, and the tokens that are sampled after each, round by round, until they decide."""
FEWEST = 128
"""Tokens below which their mean is no normal variable."""
SECONDS = 60.0
"""Time after which a slow server gets no further request."""
DOUBT, CLEAR = 5.0, 1.0
"""Standard deviations that refuse the recorded settings, and that end the check early."""
SLACK = 0.02
"""Surprisal (nats per token), or share of tokens, that rounding costs at the edge of a cut-off."""
COARSE = 0.7
"""A factor of the temperature that every user would notice."""
TAIL = 0.95
"""Probability of the tokens above all of those that are counted as the least likely ones."""
_EXACT = 1e-9
"""Share that the arithmetic itself may cost where every token is a likely one."""
_SAME = 6.0
"""KL (nats) over all tokens above which the server's log-probabilities are others."""


@dataclass(frozen=True)
class Settings:
    """Sampling settings; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def text(self) -> str:
        """The settings for a person."""
        parts = [f"temperature {self.temperature:.2g}"]
        parts += [f"top_k {self.top_k}"] * (self.top_k > 0)
        parts += [f"top_p {self.top_p:.2g}"] * (self.top_p < 1)
        parts += [f"min_p {self.min_p:.2g}"] * (self.min_p > 0)
        return ", ".join(parts)

    def probabilities(self, logp: NDArray[Any]) -> NDArray[Any]:
        """Return the probabilities of sampling ids, and of all others as the last, shape (K+1,).

        Those of all others are exact at temperature 1, or if they are cut off.

        Args:
            logp: log-probabilities at temperature 1, the most likely first, shape (K,).
        """
        heat = max(self.temperature, 0.02)
        rest = max(0.0, 1 - float(np.exp(logp).sum())) if heat >= 1 else 0.0
        p = np.exp((logp - logp[0]) / heat)
        p = np.append(p, rest * np.exp(-logp[0]))
        p[self.top_k or len(p) :] = 0.0
        p /= p.sum()
        before = np.cumsum(p) - p
        p[-1] = max(0.0, min(p[-1], self.top_p - before[-1]))
        p[:-1][before[:-1] >= self.top_p] = 0.0
        p[np.append(p[:-1], p[-2]) < self.min_p * p[0]] = 0.0
        return p / p.sum()

    @property
    def cuts(self) -> bool:
        """True if some tokens are never sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def tells_others(self, p: NDArray[Any]) -> bool:
        """Return True if the last of these probabilities is exact."""
        return self.temperature == 1 or p[-2] == 0


_DEFAULTS = Settings(1.0, 50)
"""Defaults of transformers. ms-swift writes them into the live model and no file: nobody's choice,
so that a server with them and one without are both as recorded."""


class Sampled(NamedTuple):
    """Tokens that were sampled after one prompt.

    `logp` is at temperature 1, the most likely first, shape (K,); `counts` and `usable` have all
    other ids as their last, shape (K+1,). `counts` leaves out ids of the prompt, which penalties
    change, and EOS, which servers may leave out: `usable` is False for these.
    """

    logp: NDArray[Any]
    counts: NDArray[Any]
    usable: NDArray[Any]


class Excess(NamedTuple):
    """The mean of a quantity over sampled tokens, beside that under some settings.

    `excess` is the difference of the means and `deviation` its standard deviation; `coarse` is the
    size of the excess that `COARSE` would give.
    """

    tokens: int
    mean: float
    excess: float
    deviation: float
    coarse: float


Values = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""A quantity of every token, from log-probabilities (K,) and probabilities (K+1,)."""


def surprisal(logp: NDArray[Any], p: NDArray[Any]) -> NDArray[Any]:
    """Return the surprisal of every token at temperature 1 (nats)."""
    return -np.append(logp, logp[-1])


def unlikely(logp: NDArray[Any], p: NDArray[Any]) -> NDArray[Any]:
    """Return 1 for the least likely tokens, which have a share of 1 - `TAIL` or are not listed."""
    return np.append((np.cumsum(p) - p)[:-1] >= TAIL, True).astype(float)


def excess_of(values: Values, rows: Sequence[Sampled], settings: Settings) -> Excess:
    """Compare the mean of a quantity over sampled tokens with that under some settings."""
    other = replace(settings, temperature=_other(settings.temperature))
    total, seen, excess, variance, coarse = 0, 0.0, 0.0, 0.0, 0.0
    for logp, counts, usable in rows:
        p = settings.probabilities(logp)
        each = values(logp, p)
        usable = usable & (np.arange(len(p)) < len(logp) + settings.tells_others(p))
        p, q, counts = p * usable, other.probabilities(logp) * usable, counts * usable
        if not p.sum() or not q.sum():
            continue
        count, mean = int(counts.sum()), (p @ each) / p.sum()
        total += count
        seen += counts @ each
        excess += counts @ each - count * mean
        variance += count * ((p @ each**2) / p.sum() - mean**2)
        coarse += count * ((q @ each) / q.sum() - mean)
    share = 1 / max(total, 1)
    deviation = max(variance, 0.0) ** 0.5
    return Excess(total, seen * share, excess * share, deviation * share, abs(coarse) * share)


def _other(temperature: float) -> float:
    """Return a temperature that every user would tell from this one."""
    return temperature * COARSE if temperature > 1 - COARSE else temperature + 1 - COARSE


def sampling(answers: Answers, model: str, base: str | None) -> Check:
    """Compare the server's default sampling settings with those that training recorded.

    It costs `PROMPTS` requests with responses of one token for each of `ROUNDS`, until they decide
    or `SECONDS` are over.
    """
    try:
        chosen, kl = _chosen(answers, model)
        rows: list[Sampled] = []
        until = time.monotonic() + SECONDS
        for each in ROUNDS:
            rows += _sample(answers, model, chosen, each, until)
            check = _judged(answers, rows, kl)
            if check.verdict == "ok" and _is_clear(check):
                break
    except UnsupportedError as error:
        return Check(NAME, "unknown", f"default sampling settings not measured: {error.message}")
    whole = PROMPTS * sum(ROUNDS)
    if time.monotonic() > until:
        left = f"a slow server: {whole - sum(map(_count, rows))} of {whole} tokens left out"
        check = replace(check, text=f"{check.text}; {left} after {SECONDS:g} s")
    return check


def _is_clear(check: Check) -> bool:
    z, rare = (float(check.measured[name]) for name in ("z", "z_unlikely"))
    return max(abs(z), -rare) < CLEAR


def _count(row: Sampled) -> int:
    return int(row.counts.sum())


def _judged(answers: Answers, rows: list[Sampled], kl: float) -> Check:
    """Return the verdict of both tests; the rows decide whether they tell settings apart."""
    recorded = expected_settings(answers.reference)
    candidates = (recorded, Settings()) if recorded == _DEFAULTS else (recorded,)
    tests = [(excess_of(surprisal, rows, settings), settings) for settings in candidates]
    test, expected = min(tests, key=lambda pair: abs(pair[0].excess))
    tail = excess_of(unlikely, rows, expected)
    # Rounding of the server's logits moves a mean by at most sqrt(2 KL) standard deviations.
    doubt = DOUBT + (2 * kl * test.tokens) ** 0.5 / max(expected.temperature, 0.02)
    allowed = doubt * test.deviation + SLACK
    fewest = -doubt * tail.deviation - (SLACK if expected.cuts else _EXACT)
    numbers: dict[str, float | str] = {
        "z": test.excess / max(test.deviation, 1e-9),
        "z_unlikely": tail.excess / max(tail.deviation, 1e-9),
        "surprisal": test.mean,
        "excess": test.excess,
        "excess_unlikely": tail.excess,
        "samples": float(test.tokens),
    }
    cost, limits = f"{test.tokens} sampled tokens", {"excess": allowed, "excess_unlikely": fewest}
    if test.tokens < FEWEST:
        return Check(NAME, "unknown", f"{cost} are too few for a verdict", numbers)
    seen = (
        f"{cost} have a surprisal of {test.mean:.2f} nats, expected "
        f"{test.mean - test.excess:.2f} +- {allowed:.2f}"
    )
    if abs(test.excess) > allowed or tail.excess < fewest:
        how = (
            "a higher temperature" if test.excess > allowed else "a lower temperature or a cut-off"
        )
        if abs(test.excess) <= allowed:
            seen = (
                f"{tail.mean:.1%} of {cost} are unlikely ones, expected "
                f"{tail.mean - tail.excess:.1%}"
            )
        text = f"without parameters {seen}: {how}; training recorded {expected.text}"
        return Check(NAME, "fault", text, numbers, limits, (_cause(expected, answers.server.kind),))
    if test.coarse < allowed + 2 * test.deviation:
        other = _other(expected.temperature)
        text = f"{cost} do not tell temperature {other:.2g} from {expected.temperature:.2g} here"
        return Check(NAME, "unknown", text, numbers)
    text = f"without parameters the server samples with {expected.text}, as recorded: {seen}"
    return Check(NAME, "ok", text, numbers, limits)


def expected_settings(reference: Reference) -> Settings:
    """Return the settings of the recorded generation configuration, as vLLM reads it."""
    tokens = reference.facts.get("tokens")
    recorded = tokens.get("generation_config") if isinstance(tokens, Mapping) else None
    recorded = recorded if isinstance(recorded, Mapping) else {}

    def number(name: str, default: float) -> float:
        value = recorded.get(name)
        return float(value) if isinstance(value, int | float) else default

    top_k = max(0, int(number("top_k", 0)))
    top_p, min_p = number("top_p", 1.0) or 1.0, number("min_p", 0.0)
    return Settings(max(0.0, number("temperature", 1.0)), top_k, top_p, min_p)


def _chosen(answers: Answers, model: str) -> tuple[list[tuple[int, int, int]], float]:
    """Return the places whose next token tells most, and the server's mean KL there (nats).

    A place is its row in the fingerprint, its probe, and its position in the probe.
    """
    server, reference = answers.server, answers.reference
    if not server.abilities.token_ids:
        raise UnsupportedError("the server takes no token ids as a prompt")
    served, trained = answers.aligned(model), reference.trained
    places = [(p, t) for p, probe in enumerate(reference.probes) for t in range(len(probe.ids) - 1)]
    settings = expected_settings(reference)
    spread = [_spread(np.sort(row.astype(np.float64))[::-1], settings) for row in trained.logprobs]
    information = np.where(served.measured, spread, -1.0)
    chosen: list[tuple[int, int, int]] = []
    for row in map(int, np.argsort(-information)):
        probe, at = places[row]
        if at > 0 and information[row] > 0 and sum(other == probe for _, other, _ in chosen) < 2:
            chosen.append((row, probe, at))
        if len(chosen) == PROMPTS:
            break
    if not chosen:
        raise UnsupportedError("no prompt whose next token is uncertain")
    kl = float(np.nanmean(coarse_kl(trained, served)[[row for row, _, _ in chosen]]))
    if kl * PROMPTS * sum(ROUNDS) > _SAME:
        raise UnsupportedError(f"the server's own log-probabilities are others (KL {kl:.1e})")
    return chosen, kl


def _spread(logp: NDArray[Any], settings: Settings) -> float:
    """Return the variance of the surprisal of a sampled token (nats squared)."""
    p = settings.probabilities(logp)
    values = surprisal(logp, p)
    return float(p @ values**2 - (p @ values) ** 2)


def _sample(
    answers: Answers, model: str, chosen: Sequence[tuple[int, int, int]], each: int, until: float
) -> list[Sampled]:
    """Sample `each` first tokens after every prompt; nothing is sent after the time `until`."""
    server, reference, trained = answers.server, answers.reference, answers.reference.trained

    def draw(place: tuple[int, int, int]) -> Sampled | None:
        row, probe, at = place
        prompt = reference.probes[probe].ids[: at + 1]
        if time.monotonic() > until:
            return None
        try:
            responses = server.generate(model, prompt, 1, n=each)
        except ServerError as error:
            if error.code == "busy" and not isinstance(error, UnsupportedError):
                return None  # too slow for this one; the others count
            raise
        if any(response.ids is None for response in responses):
            raise UnsupportedError("the server does not tell the ids of its tokens")
        tokens = [response.ids[0] for response in responses if response.ids]
        logp = trained.logprobs[row].astype(np.float64)
        order = np.argsort(-logp)
        ids, logp = trained.ids[row][order], logp[order]
        left_out = {*prompt, *_ends(reference)}
        usable = np.append(~np.isin(ids, list(left_out)), True)
        counts = [tokens.count(token) for token in ids]
        others = sum(token not in left_out and token not in ids for token in tokens)
        return Sampled(logp, np.array([*counts, others]) * usable, usable)

    with ThreadPoolExecutor(4) as pool:
        return [row for row in pool.map(draw, chosen) if row is not None]


def _ends(reference: Reference) -> list[int]:
    """Return the ids that end a text, of all places where they are recorded."""
    tokens = reference.facts.get("tokens")
    ends: list[int] = []
    for part in tokens.values() if isinstance(tokens, Mapping) else ():
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        ends += [token for token in (value if isinstance(value, list) else [value]) if token]
    return [end for end in ends if isinstance(end, int)]


def _cause(expected: Settings, kind: str) -> Cause:
    if kind == "llama.cpp":
        start = "llama-server with --temp, --top-k, --top-p and --min-p, which has its own defaults"
    else:
        start = (
            "vLLM with --generation-config vllm (no defaults of the folder), or with the trained "
            "folder's generation_config.json"
        )
    return Cause(
        "default-temperature",
        "the server's defaults override the recorded ones: those of the engine, of "
        "generation_config.json, or of a Modelfile",
        f"send temperature, top_k and top_p with every request ({expected.text}), or start {start}",
    )
