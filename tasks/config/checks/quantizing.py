"""Quantised models (`convert.quantize`): the library, the model's layers, the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.finding import Finding
from tasks.drift.fingerprint import EXPERTS
from tasks.quantize import CONVERTED, ENVIRONMENT
from tasks.serving.llama_cpp import CONVERTER, QUANTIZER, SERVER, find_programs
from tasks.weights.quantized.quantize import GGUF

_KEY, _WITHOUT = "convert.quantize", "convert.quantize=none"
_CONVOLUTIONS = ("gpt2", "openai-gpt")
"""Model types whose linear layers are `Conv1D` in transformers."""
GGUF_READ = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "falcon", "stablelm",
    "starcoder2", "nemotron",
)  # fmt: skip
"""Model types whose GGUF files transformers reads, so that they can be compared."""
GROUPS = (128, 64, 32)
"""Group sizes of 4 bits that vLLM has kernels for, on GPUs (Marlin) and CPUs."""


def quantizing(
    convert: Mapping[str, Any],
    config: Mapping[str, Any],
    version: Callable[[str], str],
    *,
    is_reward: bool = False,
    engine: str = "vllm",
    environment: Path = ENVIRONMENT,
) -> list[Finding]:
    """Return every reason why a model cannot be quantised.

    Args:
        convert: section `convert`.
        config: contents of the model's config.json; empty if unknown.
        version: returns the version of a distribution; "0" if it is not installed.
        is_reward: True for a reward model.
        engine: `smoke.engine`.
        environment: interpreter that runs llm-compressor.
    """
    scheme = convert["quantize"]
    if scheme == "none":
        return []
    text = config.get("text_config") or config
    problems = [*_problems(text, is_reward)]
    if engine == "none":
        what = "a quantised model is measured before it is handed on"
        problems.append(("without a smoke test", what, "smoke.engine=vllm"))
    if scheme.startswith(GGUF):
        problems += _for_llama_cpp(text, scheme.removeprefix(GGUF), convert["llama_cpp"], version)
    elif version("compressed-tensors") == "0":
        what = "compressed-tensors writes it; it comes with vLLM"
        problems.append(("without compressed-tensors", what, "pip install compressed-tensors"))
    if scheme == "w4a16":
        problems += _in_4_bits(text, convert["group_size"], environment)
    return [Finding(_KEY, f"{scheme} {why}", allowed, to) for why, allowed, to in problems]


def _problems(text: Mapping[str, Any], is_reward: bool) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong, what is allowed, and what to type."""
    if is_reward:
        what = "only language models are quantised; a reward is compared by its size"
        yield "of a reward model", what, _WITHOUT
    plain = "models of plain linear layers are quantised"
    experts = next((f"{key} {text[key]}" for key in EXPERTS if text.get(key)), None)
    if experts:
        yield f"of a mixture of experts ({experts})", plain, _WITHOUT
    if text.get("model_type") in _CONVOLUTIONS:
        yield f"of {text['model_type']}, whose layers are convolutions", plain, _WITHOUT


def _for_llama_cpp(
    text: Mapping[str, Any], kind: str, folder: str | None, version: Callable[[str], str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the same for GGUF, which llama.cpp writes and serves."""
    programs = find_programs(folder)
    wanted = {CONVERTER: programs.converter, SERVER: programs.server}
    if kind not in CONVERTED:
        wanted[QUANTIZER] = programs.quantizer
    if missing := [name for name, path in wanted.items() if path is None]:
        where = "on PATH" if folder is None else f"in {folder}"
        what = "llama.cpp writes and serves the file; users install it"
        yield f"without {', '.join(missing)} {where}", what, "convert.llama_cpp=<its folder, built>"
    if version("gguf") == "0":
        yield "without gguf", "transformers reads the file with it", "pip install gguf"
    model_type = text.get("model_type")
    if model_type and model_type not in GGUF_READ:
        known = f"transformers reads GGUF files of {', '.join(GGUF_READ)}"
        yield f"of {model_type}", known, _WITHOUT


def _in_4_bits(
    text: Mapping[str, Any], group: int, environment: Path
) -> Iterator[tuple[str, str, str]]:
    """Yield the same for 4 bits."""
    if not environment.is_file():
        what = f"llm-compressor is in an environment of its own, {environment.parents[1]}"
        yield "without llm-compressor", what, "make setup-quantize"
    if group not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        yield f"in groups of {group}", f"vLLM has kernels for {known}", "convert.group_size=128"
        return
    heads = text.get("num_attention_heads") or 1
    widths = {
        "hidden_size": text.get("hidden_size"),
        "intermediate_size": text.get("intermediate_size"),
        "num_attention_heads * head_dim": heads * (text.get("head_dim") or 0),
    }
    for name, width in widths.items():
        if width and width % group:
            smaller = next((size for size in GROUPS if width % size == 0), None)
            to = f"convert.group_size={smaller}" if smaller else "convert.quantize=w8a8"
            yield f"of {name} {width}", f"a multiple of convert.group_size={group}", to
