"""Functions that the reference child runs for `tasks/evaluation/scoring.py`: they need torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Tokens = Sequence[Sequence[int]]
ARGUMENTS, RESULT = "arguments.pickle", "result.pickle"
"""Files in the folder of a request."""


@dataclass(frozen=True)
class ModelRef:
    """A model to load."""

    path: Path  # Hugging Face folder; the base if there is an adapter
    adapter: Path | None = None  # PEFT folder of an unmerged adapter on top
    # {"type": "nf4" | "fp4", "double_quant": bool, "compute_dtype": str}
    quantization: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    # weights of several adapters by folder, instead of one adapter
    weighted: Mapping[str, float] | None = None
    device: str | None = None  # "cpu" or "cuda"; None for a GPU if there is one, else the CPU
    float32: bool = False  # True to compute in float32, with weights that are rounded to `dtype`


@dataclass(frozen=True)
class Generated:
    """Responses of transformers."""

    tokens: list[list[int]]  # new tokens of each prompt, with EOS if it was reached
    # for each prompt and step the most likely (token, logit) pairs, best first; empty for sampled
    # responses
    candidates: list[list[list[tuple[int, float]]]]
    seconds: float  # time of generation without loading


@dataclass(frozen=True)
class Scores:
    """Outputs of a reward model, and their noise if it was trained on other hardware."""

    scores: list[float]
    noise: float | None
    on: dict[str, str]  # hardware and software that computed them


def fingerprint(model: ModelRef, reference: Path, out: Path) -> None:
    """Save the fingerprint at the token ids of another one."""
    from tasks.drift.fingerprint import Fingerprint
    from tasks.serving.reference.measure import fingerprint

    like = Fingerprint.load(reference)
    fingerprint(load(model), like).save(out)


def reference(
    model: ModelRef,
    out: Path,
    probes: Tokens,
    like: Path | None,
    own: Path | None,
    base: Path | None,
) -> None:
    """Save the fingerprint that other models are compared with: in float32, with the noise."""
    from tasks.drift.fingerprint import Fingerprint, require_informative
    from tasks.serving.reference.load import widen
    from tasks.serving.reference.measure import fingerprint, noise_of_formats, reference

    recorded = Fingerprint.load(like) if like else None
    loaded = load(model)
    if own:
        assert recorded is not None
        fingerprint(loaded, recorded).save(own)
    widen(loaded)
    measured = fingerprint(loaded, recorded) if recorded else reference(loaded, probes)
    require_informative(measured, str(model.path))
    if base:
        with loaded.disable_adapter():
            fingerprint(loaded, measured).save(base)
    replace(measured, formats=noise_of_formats(loaded, measured)).save(out)


def rewards(
    model: ModelRef, probes: Tokens, raw: bool, trained_on: Mapping[str, Any] | None = None
) -> Scores:
    """Score each probe; the noise is measured where the model was trained on another machine."""
    from tasks.serving.reference.load import options
    from tasks.serving.reference.rewards import load_rewarder

    rewarder = load_rewarder(model.path, adapter=model.adapter, **options(model))
    scores = rewarder.scores(probes, raw=raw)
    elsewhere = trained_on is not None and trained_on != rewarder.on
    return Scores(scores, rewarder.noise(probes) if elsewhere else None, rewarder.on)


def greedy(model: ModelRef, prompts: Tokens, max_new_tokens: int, eos: Sequence[int]) -> Generated:
    """Generate greedily, one prompt at a time."""
    from tasks.serving.reference.measure import greedy

    loaded, ends = load(model), frozenset(eos)
    began = time.perf_counter()
    done = [greedy(loaded, p, max_new_tokens=max_new_tokens, eos=ends) for p in prompts]
    seconds = time.perf_counter() - began
    return Generated([tokens for tokens, _ in done], [steps for _, steps in done], seconds)


def sample(
    model: ModelRef,
    prompts: Tokens,
    max_new_tokens: int,
    temperature: float,
    eos: Sequence[int],
) -> Generated:
    """Sample a response to each prompt, with the number of the prompt as seed."""
    from tasks.serving.reference.measure import sample

    loaded, ends = load(model), frozenset(eos)
    how = {"max_new_tokens": max_new_tokens, "eos": ends, "temperature": temperature}
    began = time.perf_counter()
    tokens = [sample(loaded, p, seed=n, **how) for n, p in enumerate(prompts)]
    return Generated(tokens, [], time.perf_counter() - began)


def token_logprobs(model: ModelRef, prompts: Tokens, responses: Tokens) -> list[list[float]]:
    """Return the log-probability of each token of each response, in nats."""
    from tasks.serving.reference.measure import token_logprobs

    loaded = load(model)
    pairs = zip(prompts, responses, strict=True)
    return [token_logprobs(loaded, *pair) for pair in pairs]


def layer_errors(model: ModelRef, quantized: Path, rows: Tokens) -> list[tuple[str, float]]:
    """Return the relative output error of each layer once quantised, the largest first."""
    from tasks.serving.reference.measure import layer_errors

    stored = load(replace(model, path=quantized), as_stored=True)
    return layer_errors(load(model), stored, rows)


def load(model: ModelRef, *, as_stored: bool = False) -> Any:
    """Load a model; see `load_model`."""
    from tasks.serving.reference.load import load_model, options, widen

    loaded = load_model(
        model.path,
        adapter=model.adapter,
        weighted=model.weighted,
        as_stored=as_stored,
        **options(model),
    )
    if model.float32:
        widen(loaded)
    return loaded
