"""Checks of vLLM beside a trainer: start, sleep, adapters, whole weights under CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Set up a single rank as an online run does: torchrun's environment, a compiler on a GPU."""
    import torch

    from tasks.process.block_unused_imports import start_lean

    start_lean(compiler=torch.cuda.is_available())
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
    yield


def written(setting: Setting, model: Any, name: str) -> Path:
    """The model's folder."""
    path = setting.folder / f"{name}-{os.environ.get('RANK', '0')}"
    model.save_pretrained(path)
    return path


def policy_of(setting: Setting, **changes: Any) -> Any:
    """A random Qwen2 in bf16 whose heads are large enough for vLLM on a CPU."""
    import torch

    if setting.tiny:
        changes |= {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 304}
    return model_of(setting, dtype=torch.bfloat16, **changes)


def started(setting: Setting, folder: Path, *, adapter_rank: int | None) -> Any:
    """The engine as training starts it."""
    from tasks.serving.vllm.colocation import Colocation, Sampling
    from tasks.serving.vllm.rollouts import Colocated

    how = Colocation(
        folder, max_model_len=128, max_num_seqs=64, kv_cache_gib=0.1, gpu_memory=0.4,
        adapter_rank=adapter_rank, tensor_parallel=setting.gpus,
    )  # fmt: skip
    return Colocated(how, Sampling(max_new_tokens=LENGTH))


def mismatch(engine: Any, model: Any) -> float:
    """Mean absolute difference of the engine's log-probabilities and the model's, nats."""
    import torch

    apart = []
    for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, range(4)), strict=True):
        ids = torch.tensor([[*prompt, *answer.ids.tolist()]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        apart.append((own - torch.from_numpy(answer.logprobs)).abs())
    return float(torch.cat(apart).mean())


def free_mib(setting: Setting) -> int:
    """Free memory of the GPU; 0 on a CPU."""
    import torch

    gc.collect()
    if setting.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0] >> 20)


def engine(setting: Setting) -> Numbers:
    """Start with compilation and CUDA graphs; swap adapters; sleep and wake without leaks."""
    from peft import LoraConfig, get_peft_model

    found: dict[str, float | str] = {}
    with one_rank():
        base = policy_of(setting)
        folder = written(setting, base, "engine-base")
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
        began = time.monotonic()
        running = started(setting, folder, adapter_rank=16)
        found["start s"] = round(time.monotonic() - began)
        for version in (1, 2):
            _move(policy, "lora_B", version)
            adapter = setting.folder / f"adapter-{version}-{os.environ['RANK']}"
            policy.save_pretrained(adapter)
            began = time.monotonic()
            running.load_adapter(adapter, version)
            found[f"swap {version} s"] = round(time.monotonic() - began, 2)
            found[f"apart {version}"] = round(mismatch(running, policy), 4)
            assert found[f"apart {version}"] <= APART, found
        asleep = []
        for _ in range(CYCLES):
            running.sleep()
            asleep.append(free_mib(setting))
            began = time.monotonic()
            running.wake()
            found["wake s"] = round(time.monotonic() - began, 2)
            running.load_adapter(adapter, version := version + 1)
            found["apart after sleep"] = round(mismatch(running, policy), 4)
            assert found["apart after sleep"] <= APART, found
        found["lost by cycles MiB"] = asleep[0] - asleep[-1]
        assert asleep[0] - asleep[-1] <= LEFT_MIB, asleep
        running.close()
    return found


def reload(setting: Setting) -> Numbers:
    """Sync the merged weights of a DoRA policy with a tied head twice, under CUDA graphs."""
    from peft import LoraConfig, get_peft_model

    from tasks.rl.rollout.merged import merged_tensors
    from tasks.weights.model import model_facts

    found: dict[str, float | str] = {}
    with one_rank():
        base = policy_of(setting, tie_word_embeddings=True)
        folder = written(setting, base, "reload")
        facts = model_facts(folder)
        config = LoraConfig(r=16, use_dora=True, target_modules="all-linear")
        policy = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
        running = started(setting, folder, adapter_rank=None)
        for version in (1, 2):
            _move(policy, "lora_B", version)
            if version == 2:
                running.sleep()
                running.wake_weights()
            began = time.monotonic()
            running.load_weights(merged_tensors(policy, facts), version)
            running.wake()
            found["s"] = round(time.monotonic() - began, 2)
            found["apart"] = round(mismatch(running, policy), 4)
            assert found["apart"] <= APART, found
        running.close()
    return found


def _move(policy: Any, part: str, seed: int) -> None:
    """Add noise to the parameters whose names contain `part`: another policy."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if part in name:
                noise = torch.randn(parameter.shape, generator=draw) * 0.02
                parameter.add_(noise.to(parameter.device, parameter.dtype))


def followed(setting: Setting, names: Sequence[str]) -> Numbers:
    """Policies in DeepSpeed's engine, synced to vLLM and sampled: see `tests/rl`."""
    from tests.rl import test_rollouts
    from tests.training.conftest import make_tokenizer, save_base

    base = setting.folder / "base32"
    if not base.exists():  # small on a GPU too: its bars are those of the CPU tests
        save_base(base, make_tokenizer(), hidden_size=128, intermediate_size=256)
    folder = setting.folder / f"rollouts-{setting.gpus}"
    folder.mkdir()
    seen: dict[str, Any] = {}
    for name in names:  # vLLM 0.32 starts one engine with sleep mode per process
        seen |= test_rollouts.run((name,), base, folder, nproc=setting.gpus)
    for name in names:
        test_rollouts.require_followed(seen[name])
    return {
        f"{name} apart": round(max(rank["differs_after"] for rank in seen[name]), 4)
        for name in names
    }


def rollouts(setting: Setting) -> Numbers:
    """LoRA, full, QLoRA and DoRA policies on one GPU."""
    return followed(setting, ("lora", "full", "qlora", "dora"))


def rollouts_ranks(setting: Setting) -> Numbers:
    """Policies under ZeRO-2 and ZeRO-3 on several GPUs, each with an engine."""
    return followed(setting, ("lora", "full", "lora-zero3"))


def engine_parallel(setting: Setting) -> Numbers:
    """One engine on several GPUs (`rollout.tensor_parallel`)."""
    return followed(setting, ("parallel",))
