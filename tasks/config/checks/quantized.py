"""Models that cannot be quantised (`convert.quantize`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.core.errors import Finding
from tasks.drift.fingerprint import EXPERTS
from tasks.serving.llama_cpp import CONVERTER, QUANTIZER, SERVER, find_programs
from tasks.weights.quantized.packed import CONV1D
from tasks.weights.quantized.quantize import GGUF

GGUF_READ = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "falcon", "stablelm",
    "starcoder2", "nemotron",
)  # fmt: skip
"""Model types whose GGUF files transformers reads, so that they can be compared."""


def quantizing(
    convert: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    is_reward: bool = False,
    engine: str = "vllm",
) -> Iterator[Finding]:
    """Yield every reason why a model cannot be quantised (`convert.quantize`).

    `config` is the model's config.json, empty if unknown; `engine` is `smoke.engine`.
    """
    scheme, text = convert["quantize"], config.get("text_config") or config
    if scheme == "none":
        return
    from tasks.quantize import CONVERTED  # loads what measures a quantised model

    family, missing, readable, override = text.get("model_type"), [], True, "convert.quantize=none"
    if scheme.startswith(GGUF):
        programs = find_programs(convert["llama_cpp"])
        needed = {CONVERTER: programs.converter, SERVER: programs.server}
        if scheme.removeprefix(GGUF) not in CONVERTED:
            needed[QUANTIZER] = programs.quantizer
        missing = [name for name, path in needed.items() if path is None]
        readable = not family or family in GGUF_READ
    experts = any(text.get(key) for key in EXPERTS)
    for wrong, allowed, instead in (
        (is_reward, "a reward model is served in 16 bits", override),
        (experts, "experts are not quantised, only plain linear layers", override),
        (family in CONV1D, f"{family} has convolutions as layers", override),
        (engine == "none", "a quantised model is measured first", "smoke.engine=vllm"),
        (missing, f"needs llama.cpp: {', '.join(missing)}", "convert.llama_cpp=<its folder>"),
        (not readable, f"transformers reads GGUF of {', '.join(GGUF_READ)}", override),
    ):
        if wrong:
            yield Finding("convert.quantize", scheme, allowed, instead)
