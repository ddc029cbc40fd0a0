"""Checks of vLLM beside a trainer: start, sleep and adapters under CUDA graphs; tests/rl."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.numerics import model_of
from tests.gpu.suite import Numbers, Setting

CYCLES = 4
LEFT_MIB = 64
"""GPU memory that a cycle or an engine may leave behind: rounding of torch's allocator."""
APART = 0.02
"""Largest mean difference, in nats, of vLLM's and transformers' log-probabilities in bf16."""
PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 30, 8)]
LENGTH = 24


def become_a_rank() -> None:
    """Set up a single rank as an online run does: torchrun's environment, a compiler on a GPU."""
    import torch

    from tasks.process.torch_process import start_lean

    start_lean(compiler=torch.cuda.is_available())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    )  # fmt: skip


def policy_of(setting: Setting, folder: Path) -> Any:
    """Return a random Qwen2 in bf16 with an adapter of rank 16; its base is saved in a folder."""
    import torch
    from peft import LoraConfig, get_peft_model

    # Heads that are large enough for vLLM on a CPU.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 304}
    base = model_of(setting, dtype=torch.bfloat16, **(sizes if setting.tiny else {}))
    base.save_pretrained(folder)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(base, config, autocast_adapter_dtype=False).eval()


def started(folder: Path) -> Any:
    """Start the engine as training does."""
    from tasks.config.sections import Rollout
    from tasks.serving.vllm.colocation import Colocation
    from tasks.serving.vllm.rollouts import Colocated

    rollout = Rollout(
        max_prompt_len=64, max_new_tokens=64, max_num_seqs=64, kv_cache_gib=0.1, gpu_memory=0.4,
    )  # fmt: skip
    return Colocated(Colocation(folder, rollout, adapter_rank=16))


def require_close(engine: Any, model: Any) -> float:
    """Return the mean absolute difference of the engine's log-probabilities and the model's."""
    import torch

    differences = []
    answers = engine.generate(PROMPTS, range(4), [LENGTH] * 4)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.ids.tolist()]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        differences.append((own - torch.from_numpy(answer.logprobs)).abs())
    apart = float(torch.cat(differences).mean())
    assert apart <= APART
    return round(apart, 4)


def free_mib(setting: Setting) -> int:
    """Return the free memory of the GPU; 0 on a CPU."""
    import torch

    gc.collect()
    if setting.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0] >> 20)


def engine(setting: Setting) -> Numbers:
    """Start with compilation and CUDA graphs; swap adapters; sleep and wake without leaks."""
    become_a_rank()
    folder, adapter = setting.folder / "engine-base", setting.folder / "adapter"
    policy, began = policy_of(setting, folder), time.monotonic()
    running = started(folder)
    numbers: dict[str, float | str] = {"start s": round(time.monotonic() - began)}
    asleep = []
    for version in range(1, CYCLES + 1):
        _move(policy, version)
        policy.save_pretrained(adapter)
        began = time.monotonic()
        running.wake()
        running.load_adapter(adapter, version)
        numbers["wake and swap s"] = round(time.monotonic() - began, 2)
        numbers[f"apart {version}"] = require_close(running, policy)
        running.sleep()
        asleep.append(free_mib(setting))
    numbers["lost by cycles MiB"] = asleep[0] - asleep[-1]
    assert asleep[0] - asleep[-1] <= LEFT_MIB, asleep
    running.close()
    return numbers


def _move(policy: Any, seed: int) -> None:
    """Add noise to the adapter: another policy."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=draw) * 0.02
                parameter.add_(noise.to(parameter.device, parameter.dtype))


def followed(setting: Setting, names: Sequence[str]) -> Numbers:
    """Policies in DeepSpeed's engine, synced to vLLM and sampled: see `tests/rl`."""
    from tests.rl.test_rollouts import follow
    from tests.tiny import make_tokenizer, save_base

    base = setting.folder / "base32"
    if not base.exists():  # small on a GPU too: its bars are those of the CPU tests
        save_base(base, make_tokenizer(), hidden_size=128, intermediate_size=256)
    for name in names:  # vLLM 0.32 starts one engine with sleep mode per process
        folder = setting.folder / f"rollouts-{name}-{setting.gpus}"
        folder.mkdir()
        follow((name,), base, folder, ranks=setting.gpus)
    return {"policies": len(names)}


def rollouts(setting: Setting) -> Numbers:
    """LoRA, full, QLoRA and DoRA policies on one GPU."""
    return followed(setting, ("lora", "full", "qlora", "dora"))


def rollouts_ranks(setting: Setting) -> Numbers:
    """Policies under ZeRO-2 and ZeRO-3 on several GPUs, each with an engine."""
    return followed(setting, ("lora", "full"))


def engine_parallel(setting: Setting) -> Numbers:
    """One engine on several GPUs (`rollout.tensor_parallel`)."""
    return followed(setting, ("parallel",))
