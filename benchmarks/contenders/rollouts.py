"""Rollouts and weight syncs that `make bench-rl` times, each in its own process:

    torchrun --standalone -m benchmarks.contenders.rollouts rollout '{"base": ..., "out": ...}'

Each prints one JSON line with seconds. Ours run in a training process, as training starts it. A
training run has many rollouts, so the second rollout of each process is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.training import device
from benchmarks.harness import say
from benchmarks.inputs import HANDED_RANK, RANK, SIZES, draw_prompts, draw_response_lengths


@dataclass(frozen=True)
class Ask:
    """Arguments of a job.

    Attributes:
        base: folder of the model.
        out: empty folder.
        size: size of the model, a key of `SIZES`.
        adapter: folder of the adapter for rollouts.
        times: number of weight syncs after the first.
    """

    base: str
    out: str
    size: str
    adapter: str = ""
    times: int = 2


def rollout(ask: Ask) -> None:
    """Roll out with vLLM and the adapter in a training process."""
    from tasks.process.torch_process import start_lean

    start_lean()
    from tasks.config.sections import Rollout
    from tasks.serving.vllm.colocation import Colocation
    from tasks.serving.vllm.rollouts import Colocated

    prompts, lengths = draw_prompts(SIZES[ask.size].vocabulary), draw_response_lengths()
    lengths_of = Rollout(max_prompt_len=128, max_new_tokens=128)
    engine = Colocated(Colocation(Path(ask.base), lengths_of, adapter_rank=RANK))
    engine.load_adapter(Path(ask.adapter), 1)
    seeds = list(range(len(prompts)))
    engine.generate(prompts, seeds, limits=lengths)
    began = time.perf_counter()
    responses = engine.generate(prompts, seeds, limits=lengths)
    spent = time.perf_counter() - began
    engine.close()
    _say_useful([len(response.ids) for response in responses], lengths, spent)


def vllm_alone(ask: Ask) -> None:
    """Roll out with vLLM in its own process, as its documentation starts it."""
    from tasks.serving.vllm.job import environment

    os.environ.update(environment(1, None))
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    prompts, lengths = draw_prompts(SIZES[ask.size].vocabulary), draw_response_lengths()
    llm = LLM(
        model=ask.base, dtype="bfloat16", max_model_len=256, enable_lora=True, max_lora_rank=RANK,
        skip_tokenizer_init=True, gpu_memory_utilization=0.5, seed=0,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, seed=i, logprobs=0,
                       detokenize=False)
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    policy = LoRARequest("policy", 1, ask.adapter)
    for _ in range(2):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(inputs, params, lora_request=policy, use_tqdm=False)
        spent = time.perf_counter() - began
    _say_useful([len(output.outputs[0].token_ids) for output in outputs], lengths, spent)


def shipped(ask: Ask) -> None:
    """Roll out like `rollout`, without the functions of vLLM that we replace on a CPU."""
    from tasks.serving.vllm import rollouts

    for name in ("use_single_adapter_products", "use_fp32_products"):
        setattr(rollouts, name, lambda: False)
    rollout(ask)


def transformers_rollout(ask: Ask) -> None:
    """Roll out with transformers' `generate`, adapter merged: one batch, padded on the left."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompts, lengths = draw_prompts(SIZES[ask.size].vocabulary), draw_response_lengths()
    base: Any = AutoModelForCausalLM.from_pretrained(ask.base, dtype=torch.bfloat16)
    model: Any = PeftModel.from_pretrained(base, ask.adapter).merge_and_unload().eval()
    model.to(device())
    width = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in "ab")
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device()), mask.to(device())

    def generate(count: int) -> Any:
        with torch.no_grad():
            return model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0,
                max_new_tokens=count, min_new_tokens=count,
            )  # fmt: skip

    generate(max(lengths))
    began = time.perf_counter()
    made = generate(max(lengths)).shape[1] - width
    _say_useful([min(made, n) for n in lengths], lengths, time.perf_counter() - began)


def _say_useful(made: Sequence[int], wanted: Sequence[int], seconds: float) -> None:
    if list(made) != list(wanted):
        raise SystemExit(f"responses have {sum(made)} tokens, wanted {sum(wanted)}")
    say(tokens=sum(made), seconds=[seconds])


def adapter(ask: Ask) -> None:
    """Sync the policy's adapter to vLLM as training does, with all checks."""
    from tasks.rl.rollout.engine import VllmEngine
    from tasks.rl.rollout.policy import Policy

    engine, job, ranks, how = _policy(ask)
    policy = Policy(engine, job, ranks)
    with closing(VllmEngine(policy, how, ends=(1,), probes=[[1, 2, 3]])) as answering:
        spent = []
        for _ in range(ask.times + 1):
            began = time.perf_counter()
            answering.sync_weights()
            spent.append(time.perf_counter() - began)
    trained = (each for each in engine.module.parameters() if each.requires_grad)
    say(seconds=spent[1:], nbytes=sum(each.numel() * each.element_size() for each in trained))


def weights(ask: Ask) -> None:
    """Sync the same policy to vLLM as merged weights, all of them, without the checks."""
    from tasks.rl.rollout.policy import merged_tensors
    from tasks.serving.vllm.colocation import Colocation
    from tasks.serving.vllm.rollouts import Colocated
    from tasks.weights.model import model_facts

    engine, job, _, how = _policy(ask)
    facts = model_facts(job.base, job.settings.dtype)
    vllm = Colocated(Colocation(job.base, how))
    spent = []
    for version in range(1, ask.times + 2):
        began = time.perf_counter()
        vllm.load_weights(merged_tensors(engine.module, facts), version)
        spent.append(time.perf_counter() - began)
    vllm.close()
    nbytes = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    say(seconds=spent[1:], nbytes=nbytes)


def _policy(ask: Ask) -> tuple[Any, Any, Any, Any]:
    """Return the policy in a DeepSpeed engine, its job, its single rank, and section `rollout`."""
    from tasks.process.torch_process import start_lean

    start_lean()
    from tasks.config.defaults import ALGORITHMS
    from tasks.rl.settings import Online
    from tasks.training.engine.deepspeed_engine import Ranks, start_engine
    from tasks.training.engine.zero_config import deepspeed_config
    from tasks.training.job import Batch, Launch, Optim, Peft, Settings, TrainJob, Zero
    from tasks.training.model.build import load_model, load_tokenizer

    rollout = {
        "max_new_tokens": 64, "max_prompt_len": 256, "kv_cache_gib": 0.25, "max_num_seqs": 16,
        "offload_trainer": False,
    }  # fmt: skip
    settings = Settings(
        objective="grpo",
        peft=Peft("lora", rank=HANDED_RANK, alpha=HANDED_RANK),
        zero=Zero(0),
        optim=Optim(lr=1e-4),
        batch=Batch(1, 1, max_len=1024),
        launch=Launch(nproc=1),
        gradient_checkpointing=False,
        online={"rl": ALGORITHMS["grpo"], "reward": {}, "rollout": rollout},
    )
    base, out = Path(ask.base), Path(ask.out)
    ranks, job = Ranks(), TrainJob(settings, base, "b", base, out, out)
    config = deepspeed_config(settings, 1, gpu=ranks.gpu)
    model = load_model(job, ranks, config, tokenizer=load_tokenizer(job))
    return (
        start_engine(model, config, settings.optim),
        job,
        ranks,
        Online.of(settings.online).rollout,
    )


JOBS: dict[str, Callable[[Ask], None]] = {
    "rollout": rollout,
    "shipped": shipped,
    "vllm": vllm_alone,
    "transformers": transformers_rollout,
    "adapter": adapter,
    "weights": weights,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](Ask(**json.loads(sys.argv[2])))
