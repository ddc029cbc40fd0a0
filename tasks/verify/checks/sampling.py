"""Find a server's default temperature, top-k, top-p and min-p by sampling without any parameter.

A server may take them from `generation_config.json`, or have its own. First tokens after some
prompts are counted. The expected settings are refused if others explain the counts better by
`DOUBT` nats of log-likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.comparison import coarse_kl
from tasks.verify.reference import Reference
from tasks.verify.servers.server import UnsupportedError
from tasks.verify.temperature import (
    BETAS,
    COARSE,
    DOUBT,
    Drawn,
    Settings,
    fit,
    information,
    interval,
)

NAME = "sampling"
PROMPTS, EACH = 16, (12, 64)
"""Prompts, and tokens that are sampled after each; more if the first ones do not decide."""
CLEAR = DOUBT / 4
"""Log-likelihood ratio (nats) below which nothing speaks against the recorded settings."""
_DEFAULTS = Settings(1.0, 50)
"""Defaults of transformers. ms-swift writes them into the live model and no file: nobody's choice,
so that a server with them and one without are both as recorded."""
_SAME = DOUBT / 2
"""Log-likelihood (nats) that a difference of server and witness may cost over all tokens."""


def sampling(answers: Answers, model: str, base: str | None) -> Check:
    """Compare the server's default sampling settings with those that training recorded.

    It costs `PROMPTS` requests with `EACH` responses of one token; twice that if the first do not
    decide.

    Args:
        answers: log-probabilities of the server; the reference's generation configuration is
            what is expected.
        model: name that is asked.
        base: not used.

    Raises:
        ServerError: the server does not answer, or refuses.
    """
    try:
        rows = _sample(answers, model, EACH[0])
        if not _is_clear(rows, answers.reference):
            rows = _sample(answers, model, EACH[1])
    except UnsupportedError as error:
        return Check(NAME, "unknown", f"default sampling settings not measured: {error.message}")
    return _judged(answers, rows)


def _is_clear(rows: list[Drawn], reference: Reference) -> bool:
    """Return True if tokens agree with the recorded settings, and tell another temperature."""
    expected = _expected(reference, rows)
    gain = fit(rows).likelihood(rows) - expected.likelihood(rows)
    return gain < CLEAR and information(rows, expected) >= 2 * DOUBT


def _expected(reference: Reference, rows: list[Drawn]) -> Settings:
    """Return the recorded settings; those of nobody's choice, or none, whichever is likelier."""
    recorded = expected_settings(reference)
    unset = Settings(1.0) if recorded == _DEFAULTS else recorded
    return max(recorded, unset, key=lambda settings: settings.likelihood(rows))


def _judged(answers: Answers, rows: list[Drawn]) -> Check:
    total = int(sum(row.counts.sum() + row.outside for row in rows))
    best = fit(rows)
    expected = _expected(answers.reference, rows)
    gain = best.likelihood(rows) - expected.likelihood(rows)
    low, high = interval(rows, best)
    numbers: dict[str, float | str] = {
        "temperature": 1 / best.beta,
        "temperature_low": low,
        "temperature_high": high,
        "top_k": float(best.top_k),
        "top_p": best.top_p,
        "min_p": best.min_p,
        "samples": float(total),
        "log_likelihood_ratio": gain,
    }
    cost = f"{total} sampled tokens"
    if gain > DOUBT:
        text = (
            f"without parameters the server samples with {best.text} ({low:.2g} to {high:.2g}; "
            f"{cost}); training recorded {expected.text}"
        )
        limits = {"log_likelihood_ratio": DOUBT}
        return Check(NAME, "fault", text, numbers, limits, (_cause(expected, answers.server.kind),))
    if information(rows, expected) < 2 * DOUBT:
        text = f"{cost} do not tell temperature {COARSE} from {1 / expected.beta:g} here"
        return Check(NAME, "unknown", text, numbers)
    text = (
        f"without parameters the server samples with {expected.text}, as recorded: {cost} give a "
        f"temperature of {1 / best.beta:.2f} ({low:.2f} to {high:.2f})"
    )
    return Check(NAME, "ok", text, numbers, {"log_likelihood_ratio": DOUBT})


def expected_settings(reference: Reference) -> Settings:
    """Return the settings of the recorded generation configuration, as vLLM reads it."""
    tokens = reference.facts.get("tokens")
    recorded = tokens.get("generation_config") if isinstance(tokens, Mapping) else None
    recorded = recorded if isinstance(recorded, Mapping) else {}

    def number(name: str, default: float) -> float:
        value = recorded.get(name)
        return float(value) if isinstance(value, int | float) else default

    temperature = number("temperature", 1.0)
    beta = 1 / temperature if temperature > 1 / BETAS[-1] else float(BETAS[-1])
    top_k = max(0, int(number("top_k", 0)))
    return Settings(beta, top_k, number("top_p", 1.0) or 1.0, number("min_p", 0.0))


def _sample(answers: Answers, model: str, each: int) -> list[Drawn]:
    """Sample first tokens after the prompts that tell most about the temperature."""
    server, reference = answers.server, answers.reference
    if not server.abilities.token_ids:
        raise UnsupportedError("the server takes no token ids as a prompt")
    served, trained = answers.aligned(model), reference.trained
    places = [(p, t) for p, probe in enumerate(reference.probes) for t in range(len(probe.ids) - 1)]
    p = np.exp(trained.logprobs.astype(np.float64))
    mean = (p * trained.logprobs).sum(1, keepdims=True)
    information = np.where(served.measured, (p * (trained.logprobs - mean) ** 2).sum(1), -1.0)
    chosen: list[int] = []
    for row in np.argsort(-information):
        probe, at = places[row]
        if at > 0 and information[row] > 0 and sum(places[c][0] == probe for c in chosen) < 2:
            chosen.append(int(row))
        if len(chosen) == PROMPTS:
            break
    if not chosen:
        raise UnsupportedError("no prompt whose next token is uncertain")
    kl = float(np.nanmean(coarse_kl(trained, served)[chosen]))
    if kl * PROMPTS * each > _SAME:
        raise UnsupportedError(f"the server's own log-probabilities are others (KL {kl:.1e})")

    def draw(row: int) -> Drawn:
        probe, at = places[row]
        prompt = reference.probes[probe].ids[: at + 1]
        responses = server.generate(model, prompt, 1, n=each)
        if any(response.ids is None for response in responses):
            raise UnsupportedError("the server does not tell the ids of its tokens")
        tokens = [response.ids[0] for response in responses if response.ids]
        logp = trained.logprobs[row].astype(np.float64)
        order = np.argsort(-logp)
        ids, logp = trained.ids[row][order], logp[order]
        counts = np.array([tokens.count(token) for token in ids])
        usable = ~np.isin(ids, [*prompt, *_ends(reference)])
        return Drawn(logp, counts, usable, len(tokens) - int(counts.sum()))

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(draw, chosen))


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
