"""Functions that the reference child runs for `tasks/evaluation/scoring.py`: they need torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

Tokens = Sequence[Sequence[int]]
ALTERNATIVES = 5
"""Candidates reported for every greedy step, including the chosen token."""
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


def generate(
    model: ModelRef, prompts: Tokens, most: int, eos: Sequence[int], temperature: float
) -> Generated:
    """Generate up to `most` tokens for one prompt at a time, until an EOS, which is included.

    Greedily, or sampled at a temperature > 0 with the number of the prompt as seed. Greedy steps
    come with their most likely tokens, which tell a tie from a difference.
    """
    import torch

    loaded = load(model)
    began, responses, candidates = time.perf_counter(), [], []
    for number, prompt in enumerate(prompts):
        draw = torch.Generator().manual_seed(number)  # on CPU: the same samples on every device
        tokens: list[int] = []
        steps: list[list[tuple[int, float]]] = []
        inputs, past = _ids(loaded, prompt), None
        while len(tokens) < most and not (tokens and tokens[-1] in eos):
            with torch.no_grad():
                out = loaded(input_ids=inputs, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1].float()
            if temperature:
                probabilities = (logits / temperature).softmax(dim=-1).cpu()
                tokens.append(int(torch.multinomial(probabilities, 1, generator=draw)))
            else:
                values, ids = logits.topk(min(ALTERNATIVES, logits.shape[-1]))
                steps.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
                tokens.append(int(logits.argmax()))
            inputs = _ids(loaded, tokens[-1:])
        responses.append(tokens)
        candidates.append(steps)
    return Generated(responses, candidates, time.perf_counter() - began)


def token_logprobs(model: ModelRef, prompts: Tokens, responses: Tokens) -> list[list[float]]:
    """Return the log-probability of each token of each response, in nats, over all tokens."""
    import torch

    loaded, logprobs = load(model), []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = _ids(loaded, [*prompt, *response])
        with torch.no_grad():
            logits = loaded(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        at_ids = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        logprobs.append(at_ids[:, 0].tolist())
    return logprobs


def layer_errors(model: ModelRef, quantized: Path, rows: Tokens) -> list[tuple[str, float]]:
    """Return the relative error of each quantised layer's outputs, the largest first.

    The error of a layer is sqrt(sum |y' - y|^2 / sum |y|^2) over all tokens of the rows. Both
    layers get the original model's inputs, so that an error is blamed on the layer that makes it
    and not on those after it.
    """
    import torch

    stored, original = load(replace(model, path=quantized), as_stored=True), load(model)
    named, modules = dict(stored.named_modules()), dict(original.named_modules())
    layers = {n: m for n, m in named.items() if getattr(m, "quantization_scheme", None) is not None}
    if not layers:  # from GGUF, where every linear layer is quantised and already decoded
        layers = {n: m for n, m in named.items() if isinstance(m, torch.nn.Linear)}
    sums = {name: [0.0, 0.0] for name in layers}

    def add(layer: Any, total: list[float], _: Any, inputs: tuple[Any, ...], output: Any) -> None:
        exact = output.float()
        changed = layer(*(x.to(layer.weight.device) for x in inputs)).to(exact.device).float()
        total[0] += float((changed - exact).square().sum())
        total[1] += float(exact.square().sum())

    with torch.no_grad():
        stored(_ids(stored, rows[0][:2]))  # decompresses the weights
        for name, layer in layers.items():
            modules[name].register_forward_hook(partial(add, layer, sums[name]))
        for row in rows:
            original(_ids(original, row))
    errors = {name: (lost / max(total, 1e-30)) ** 0.5 for name, (lost, total) in sums.items()}
    return sorted(errors.items(), key=lambda item: -item[1])


def _ids(model: Any, tokens: Sequence[int]) -> Any:
    """Return token ids as a batch of one, on the model's device."""
    import torch

    from tasks.serving.reference.load import input_device

    return torch.tensor([list(tokens)], device=input_device(model))


def load(model: ModelRef, *, as_stored: bool = False) -> Any:
    """Load a model; see `load_model`."""
    from tasks.serving.reference.load import load_model

    return load_model(model, as_stored=as_stored)
