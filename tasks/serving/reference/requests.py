"""The requests that the reference child answers; `tasks/evaluation/scoring.py` sends them.

Each runs in a fork of its own. Modules imported here are already imported before the fork, except
those that would initialise CUDA on a machine with a GPU (`forks.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.serving.prompts import decode, encode_texts, render, render_whole
from tasks.serving.reference.load import (
    chosen_device,
    load_model,
    placement,
    usable_attention,
    widen,
)

Response = dict[str, Any]


def _fingerprint(request: dict[str, Any]) -> Response:
    from tasks.drift.fingerprint import Fingerprint
    from tasks.serving.reference.measure import fingerprint

    reference = Fingerprint.load(Path(request["reference"]))
    measured = fingerprint(_load(request["model"]), reference)
    measured.save(Path(request["out"]))
    return {"positions": measured.positions}


def _reference(request: dict[str, Any]) -> Response:
    from dataclasses import replace

    from tasks.drift.fingerprint import Fingerprint, require_informative
    from tasks.serving.reference.measure import fingerprint, noise_of_formats, reference

    like = Fingerprint.load(Path(request["like"])) if request["like"] else None
    model = _load(request["model"])
    if request["own"]:
        assert like is not None
        fingerprint(model, like).save(Path(request["own"]))
    widen(model)
    measured = fingerprint(model, like) if like else reference(model, request["probes"])
    require_informative(measured, str(request["model"]["path"]))
    if request["base"]:
        with model.disable_adapter():
            fingerprint(model, measured).save(Path(request["base"]))
    measured = replace(measured, formats=noise_of_formats(model, measured))
    measured.save(Path(request["out"]))
    return {"positions": measured.positions}


def _rewards(request: dict[str, Any]) -> Response:
    from tasks.serving.reference.rewards import load_rewarder

    rewarder = load_rewarder(**_loading(request["model"]))
    probes, trained_on = request["probes"], request.get("trained_on")
    scores = rewarder.scores(probes, raw=bool(request["raw"]))
    elsewhere = trained_on is not None and trained_on != rewarder.on
    noise = rewarder.noise(probes) if elsewhere else None
    return {"scores": scores, "noise": noise, "on": rewarder.on}


def _encode_texts(request: dict[str, Any]) -> Response:
    folder = Path(request["tokenizer"])
    return {"tokens": encode_texts(folder, request["texts"], int(request["limit"]))}


def _encode_whole(request: dict[str, Any]) -> Response:
    return {"tokens": render_whole(Path(request["tokenizer"]), request["conversations"])}


def _greedy(request: dict[str, Any]) -> Response:
    from tasks.serving.reference.measure import greedy

    model = _load(request["model"])
    eos, limit = frozenset(request["eos"]), int(request["max_new_tokens"])
    began = time.perf_counter()
    done = [greedy(model, p, max_new_tokens=limit, eos=eos) for p in request["prompts"]]
    return {
        "tokens": [tokens for tokens, _ in done],
        "candidates": [candidates for _, candidates in done],
        "seconds": time.perf_counter() - began,
    }


def _drawn(request: dict[str, Any]) -> Response:
    from tasks.serving.reference.measure import sample

    model = _load(request["model"])
    eos, limit = frozenset(request["eos"]), int(request["max_new_tokens"])
    how = {"max_new_tokens": limit, "eos": eos, "temperature": float(request["temperature"])}
    began = time.perf_counter()
    tokens = [sample(model, p, seed=n, **how) for n, p in enumerate(request["prompts"])]
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


def _token_logprobs(request: dict[str, Any]) -> Response:
    from tasks.serving.reference.measure import token_logprobs

    model = _load(request["model"])
    pairs = zip(request["prompts"], request["replies"], strict=True)
    return {"logprobs": [token_logprobs(model, *pair) for pair in pairs]}


def _layer_errors(request: dict[str, Any]) -> Response:
    from tasks.serving.reference.layers import layer_errors

    original = _load(request["model"])
    quantized = _load(request["quantized"], as_stored=True)
    return {"layers": layer_errors(original, quantized, request["rows"])}


def _encode(request: dict[str, Any]) -> Response:
    rendered = render(
        Path(request["tokenizer"]),
        request["rows"],
        template_from=Path(request["template_from"]) if request.get("template_from") else None,
    )
    return {"prompts": rendered.prompts, "eos": rendered.eos}


def _decode(request: dict[str, Any]) -> Response:
    return {"texts": decode(Path(request["tokenizer"]), request["tokens"])}


def _load(model: dict[str, Any], *, as_stored: bool = False) -> Any:
    weighted = model.get("weighted")
    loaded = load_model(**_loading(model), weighted=weighted, as_stored=as_stored)
    if model.get("float32"):
        widen(loaded)
    return loaded


def _loading(model: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that load any kind of model."""
    device = chosen_device(model.get("device"))
    quantized = model["quantization"] is not None
    return {
        "path": Path(model["path"]),
        "adapter": Path(model["adapter"]) if model["adapter"] else None,
        "quantization": model["quantization"],
        "dtype": model["dtype"],
        "attn_implementation": usable_attention(model["attn_implementation"]),
        "device_map": placement(Path(model["path"]), device, quantized=quantized),
    }


def _weights(request: dict[str, Any]) -> Response:
    from tasks.weights.execute.worker import perform

    return perform(request["request"])


HANDLERS: Mapping[str, Callable[[dict[str, Any]], Response]] = {
    "fingerprint": _fingerprint,
    "reference": _reference,
    "rewards": _rewards,
    "encode_texts": _encode_texts,
    "greedy": _greedy,
    "drawn": _drawn,
    "token_logprobs": _token_logprobs,
    "layer_errors": _layer_errors,
    "encode": _encode,
    "encode_whole": _encode_whole,
    "decode": _decode,
    "weights": _weights,
}
