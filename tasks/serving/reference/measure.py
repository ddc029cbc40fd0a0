"""Fingerprints, greedy tokens, log-probabilities and errors of layers of a loaded model.

Every sequence runs alone, without padding and without an attention mask, as the training engine
measures itself: only the same arithmetic gives the same bits. Token ids go to the device of the
model's embeddings, and results return to the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tasks.core.errors import DriftError
from tasks.core.machine import measured_on
from tasks.drift.fingerprint import EXPERTS, Fingerprint, drift
from tasks.serving.reference.load import compute_in, input_device
from tasks.witness.plumbline_witness.prints import TOP_K, FormatNoise, largest_steps

COPIES = 8
"""Copies of a probe in one batch to measure repeat noise; a batch uses other kernels."""
ALTERNATIVES = 5
"""Candidates reported for every greedy step, including the chosen token."""
LARGEST = 65504.0
"""Largest number of float16."""


@torch.no_grad()
def noise_of_formats(model: Any, measured: Fingerprint) -> dict[str, FormatNoise]:
    """Return the noise of each 16-bit format for a model; its weights are cast in place.

    A model that could not be computed in float32 has the noise of its own format alone, between
    two orders of summation.
    """
    dtype = _dtype(model)
    if dtype != "float32":
        with other_sums(model):
            return {dtype: drift(measured, fingerprint(model, measured, COPIES), dtype).noise}
    noise = {}
    fits = all(p.abs().max() <= LARGEST for p in model.parameters() if p.is_floating_point())
    for name in ("float16", "bfloat16") if fits else ("bfloat16",):
        compute_in(model, name)  # float16 has more bits, so that bfloat16 rounds the same values
        rounded = fingerprint(model, measured)
        if np.isfinite(rounded.logprobs).all():
            noise[name] = drift(measured, rounded, name).noise
    return noise


@contextlib.contextmanager
def other_sums(model: Any) -> Iterator[None]:
    """Make the model sum in another order inside, so that differences are rounding alone.

    Uses eager attention. Another batch size is not enough: on a CPU its sums are the same.
    """
    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(name)


@torch.no_grad()
def fingerprint(model: Any, reference: Fingerprint, copies: int = 1) -> Fingerprint:
    """Score the reference's probes at the reference's token ids; `copies` of each in a batch."""
    logprobs, top1, steps = [], [], []
    start = 0
    for probe in reference.probes:
        logits = _logits(model, probe, copies)
        ids = torch.from_numpy(reference.ids[start : start + len(probe) - 1].astype(np.int64))
        if int(ids.max()) >= logits.shape[-1]:
            raise DriftError(
                f"the model knows {logits.shape[-1]} tokens, the reference scores "
                f"token {int(ids.max())}: the vocabulary shrank"
            )
        at_ids = torch.log_softmax(logits, dim=-1).gather(1, ids.to(logits.device))
        logprobs.append(at_ids.cpu().numpy())
        top1.append(logits.argmax(dim=-1).cpu().numpy())
        steps.append(largest_steps(logits.cpu().numpy()))
        start += len(probe) - 1
    return Fingerprint(
        probes=reference.probes,
        ids=reference.ids,
        logprobs=np.concatenate(logprobs).astype(np.float32),
        top1=np.concatenate(top1).astype(np.int32),
        engine="transformers",
        steps=np.concatenate(steps),
        **_facts(model),
    )


def _logits(model: Any, probe: Sequence[int], copies: int = 1) -> torch.Tensor:
    """Return the logits of all positions but the last, (T-1, V) float32, of the first copy."""
    out = model(_ids(model, [probe] * copies)).logits
    logits: torch.Tensor = out[0, :-1].float()
    return logits


def _ids(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows], device=input_device(model))


def _dtype(model: Any) -> str:
    return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")


def _facts(model: Any) -> dict[str, Any]:
    """Return the fields of a fingerprint that do not depend on the probes."""
    config = model.config.get_text_config()
    return {
        "measured_on": measured_on(input_device(model), model.config._attn_implementation),
        "dtype": _dtype(model),
        "routed": any((getattr(config, name, 0) or 0) > 1 for name in EXPERTS),
    }


@torch.no_grad()
def reference(model: Any, probes: Sequence[Sequence[int]]) -> Fingerprint:
    """Return the fingerprint of a model at its own most likely token ids.

    For a model that our training did not measure.
    """
    logits = [_logits(model, probe).cpu() for probe in probes]
    logprobs = torch.log_softmax(torch.cat(logits), dim=-1)
    ids = logprobs.topk(min(TOP_K, logprobs.shape[-1]), dim=-1).indices
    return Fingerprint(
        probes=tuple(tuple(probe) for probe in probes),
        ids=ids.to(torch.int32).numpy(),
        logprobs=logprobs.gather(1, ids).numpy(),
        top1=logprobs.argmax(dim=-1).to(torch.int32).numpy(),
        engine="transformers",
        steps=np.concatenate([largest_steps(rows.numpy()) for rows in logits]),
        **_facts(model),
    )


@torch.no_grad()
def token_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Return the log-probability of each token of a response, in nats, over the full vocabulary."""
    ids = _ids(model, [[*prompt, *response]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs: list[float] = (
        logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    )
    return logprobs


@torch.no_grad()
def sample(
    model: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    temperature: float,
    seed: int,
) -> list[int]:
    """Sample one response to a prompt; return its tokens, including the EOS if it was reached."""
    generator = torch.Generator().manual_seed(seed)  # on CPU: the same samples on every device

    def choose(logits: torch.Tensor) -> int:
        probabilities = (logits / temperature).softmax(dim=-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return _decode(model, prompt, choose, max_new_tokens, eos)


@torch.no_grad()
def greedy(
    model: Any, prompt: Sequence[int], *, max_new_tokens: int, eos: Collection[int]
) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Decode one prompt greedily.

    Returns the new tokens, including the EOS if it was reached, and for each of them the
    `ALTERNATIVES` most likely tokens with their logits, which tell a tie from a difference.
    """
    candidates: list[list[tuple[int, float]]] = []

    def choose(logits: torch.Tensor) -> int:
        values, ids = logits.topk(min(ALTERNATIVES, logits.shape[-1]))
        candidates.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
        return int(logits.argmax())

    return _decode(model, prompt, choose, max_new_tokens, eos), candidates


def _decode(
    model: Any,
    prompt: Sequence[int],
    choose: Callable[[torch.Tensor], int],
    max_new_tokens: int,
    eos: Collection[int],
) -> list[int]:
    """Append tokens to a prompt until an EOS; `choose` picks one by its (V,) float32 logits."""
    tokens: list[int] = []
    inputs, past = _ids(model, [prompt]), None
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos):
        out = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        tokens.append(choose(out.logits[0, -1].float()))
        inputs = _ids(model, [tokens[-1:]])
    return tokens


@torch.no_grad()
def layer_errors(
    original: Any, quantized: Any, rows: Sequence[Sequence[int]]
) -> list[tuple[str, float]]:
    """Return the relative error of each quantised layer's outputs, the largest first.

    The error of a layer is sqrt(sum |y' - y|^2 / sum |y|^2) over all tokens. Both layers get the
    original model's inputs, so that an error is blamed on the layer that makes it and not on those
    after it. Rows are token ids.
    """
    named = dict(quantized.named_modules())
    layers = {
        name: module
        for name, module in named.items()
        if getattr(module, "quantization_scheme", None) is not None
    }
    if not layers:  # from GGUF, where every linear layer is quantised and already decoded
        layers = {name: m for name, m in named.items() if isinstance(m, torch.nn.Linear)}
    quantized(_ids(quantized, [rows[0][:2]]))  # decompresses the weights
    sums = {name: [0.0, 0.0] for name in layers}
    modules = dict(original.named_modules())
    hooks = [
        modules[name].register_forward_hook(partial(_add, layer, sums[name]))
        for name, layer in layers.items()
    ]
    for row in rows:
        original(_ids(original, [row]))
    for hook in hooks:
        hook.remove()
    errors = {name: (lost / max(total, 1e-30)) ** 0.5 for name, (lost, total) in sums.items()}
    return sorted(errors.items(), key=lambda item: -item[1])


def _add(layer: Any, sums: list[float], _: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Add the squared error and the squared size of one layer's outputs to `sums`."""
    exact = output.float()
    changed = layer(*(x.to(layer.weight.device) for x in inputs)).to(exact.device).float()
    sums[0] += float((changed - exact).square().sum())
    sums[1] += float(exact.square().sum())
