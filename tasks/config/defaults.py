"""Defaults that depend on the model, the objective or the machine.

All other defaults are values in this package's dataclasses. A key with a rule here has the value
`${default:}` there, which `flows/cli/config.py` resolves when it composes a configuration; a value
that is set anywhere wins. Each default has a reason, which the plan and the summary print.

    default("train.lr", get)  ->  Default(0.0002, "QLoRA sft up to 20B parameters: ...")

`get("peft.kind")` returns a setting as plain text or number. Two of its keys are facts about the
base model, not settings: `model.parameters` and `model.context`, None if they are not known, and
`model.only_bf16`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from tasks.core.machine import computing_dtype, gpu_count, has_gpu, slow_bf16

COMPUTED: Any = "${default:}"
"""Marks a field of a dataclass whose default has a rule here."""
Get = Callable[[str], Any]

_USUAL = {
    "ppo_epochs": 1, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_in": "loss",
    "kl_estimator": "k3", "whiten": False, "critic_warmup": 0, "refill": 0,
    "mask_truncated": False,
}  # fmt: skip
_SINGLE = _USUAL | {"rollout_batch_size": 128, "num_generations": 1}
_GROUPS = _USUAL | {"rollout_batch_size": 32, "num_generations": 8}
_PENALISED = {"kl_in": "reward", "kl_estimator": "k1"}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "ppo": _SINGLE
    | _PENALISED
    | {"ppo_epochs": 2, "kl_coef": 0.05, "whiten": True, "critic_warmup": 2},
    "grpo": _GROUPS | {"clip_high": 0.28},
    "dapo": _GROUPS | {"clip_high": 0.28, "refill": 9, "mask_truncated": True},
    "dr_grpo": _GROUPS,
    "rloo": _GROUPS | _PENALISED | {"kl_coef": 0.01},
    "reinforce_pp": _SINGLE | _PENALISED | {"kl_coef": 0.01},
    "reinforce_pp_baseline": _GROUPS | {"kl_coef": 0.01, "kl_estimator": "k2"},
    "gspo": _GROUPS | {"clip_low": 3e-4, "clip_high": 4e-4},
}
"""Options of section `rl` by `train.objective`; sources are in `docs/online-rl.md`."""
ONLINE = tuple(ALGORITHMS)
PAIRS = ("reward", "dpo", "orpo", "simpo")
"""Objectives whose examples are pairs of sequences."""
_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_SMALL, _SHORT = 1e9, 2048
"""Parameters, and tokens a pass, up to which activations fit into the memory of most machines."""
_LARGE = 20e9  # parameters; arXiv:2305.14314 halves the rate between 13B and 33B
_EMBEDDED, _REAL = "the embedded model", "a model from model.path"


class Default(NamedTuple):
    """A default value, and the case that it applies to."""

    value: Any
    reason: str

    def line(self, key: str) -> str:
        """Return the text that the plan and the summary print."""
        value = "null" if self.value is None else self.value
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"{key}={shown} (default for {self.reason})"


def default(key: str, get: Get) -> Default:
    """Return the default of a key. Raises KeyError if it has no rule."""
    return RULES[key](get)


def _toy(get: Get) -> bool:
    return bool(get("model.kind") == "toy")


def _model_kind(get: Get) -> Default:
    if get("model.path"):
        return Default("hf", f"model.path={get('model.path')}")
    return Default("toy", "a run without model.path")


def _data_kind(get: Get) -> Default:
    unnamed = (source["path"] for source in get("data.sources") if not source.get("kind"))
    if path := get("data.path") or next(unnamed, None):
        return Default(_SUFFIXES.get(PurePath(path).suffix.lower(), "jsonl"), f"data.path={path}")
    if get("data.name"):
        return Default("hub", f"data.name={get('data.name')}")
    if get("data.sources"):
        return Default("jsonl", "data.sources")
    return Default("toy", "a run without data.path and data.name")


def _messages_key(get: Get) -> Default:
    if get("data.kind") == "csv":
        return Default(None, "CSV, whose cells hold no lists")
    return Default("messages", f"data.kind={get('data.kind')}")


def _dtype(get: Get) -> Default:
    device = get("train.device")
    if not slow_bf16(device):
        return Default("bfloat16", "a GPU" if has_gpu(device) else "a CPU with native bf16")
    if get("model.only_bf16"):
        return Default("bfloat16", "gated delta nets, which vLLM refuses in float32 on a CPU")
    size = 2 * (get("model.parameters") or 0)
    copies = get("train.nproc") + 1  # each rank's, and that of the engine that serves it
    dtype, emulated = computing_dtype("bfloat16", size, copies=copies, device=device), ""
    if dtype == "bfloat16":
        emulated = f"; float32 would be faster, but {copies} copies take over half of the memory"
    return Default(dtype, f"a CPU without native bf16{emulated}")


def _nproc(get: Get) -> Default:
    if not has_gpu(get("train.device")):
        is_cpu = get("train.device") == "cpu"
        return Default(2, "train.device=cpu" if is_cpu else "a machine without GPUs")
    gpus = gpu_count()
    if _toy(get):
        return Default(min(2, gpus), _EMBEDDED)
    return Default(gpus, f"{gpus} GPU{'s' * (gpus > 1)}")


def _micro_batch_size(get: Get) -> Default:
    objective = get("train.objective")
    if _toy(get):
        return Default(64 if objective in ONLINE else 16, _EMBEDDED)
    if objective in PAIRS:
        return Default(2, "pairs of sequences")
    return Default(4, "single sequences")


def _global_batch_size(get: Get) -> Default:
    """Return the multiple of the rows that all ranks process at once, near the usual size."""
    online, sharing = get("train.objective") in ONLINE, get("train.sequence_parallel")
    if _toy(get):
        return Default(128 if online else 32, _EMBEDDED)
    usual = 128 if online else 64
    unit = get("train.micro_batch_size") * get("train.nproc") * get("train.nodes")
    unit //= max(1, sharing)
    if unit < 1:
        return Default(usual, _REAL)
    product = "micro_batch_size x nproc x nodes" + " / sequence_parallel" * (sharing > 1)
    size = max(1, round(usual / unit)) * unit
    return Default(size, f"about {usual}, in multiples of {product} = {unit}")


def _gradient_checkpointing(get: Get) -> Default:
    if _toy(get):
        return Default(False, _EMBEDDED)
    tokens = get("train.micro_batch_size") * get("train.max_len")
    small = (get("model.parameters") or _SMALL + 1) <= _SMALL and tokens <= _SHORT
    if small and not has_gpu(get("train.device")):
        return Default(False, f"a model up to 1B on CPUs, and {tokens} tokens a pass")
    return Default(True, f"{_REAL}, as in TRL and LLaMA-Factory")


def _tokens(toy: int, usual: int, reason: str, *, share: float = 1.0) -> Callable[[Get], Default]:
    """Return a rule for a length limited to a share of the model's context."""

    def rule(get: Get) -> Default:
        if _toy(get):
            return Default(toy, _EMBEDDED)
        context = get("model.context")
        if context is not None and int(context * share) < usual:
            limit = max(1, int(context * share))
            return Default(limit, f"a model whose context is {context} tokens")
        return Default(usual, f"{_REAL}, {reason}")

    return rule


class Rate(NamedTuple):
    """A peak learning rate for real models, and its source."""

    value: float
    source: str
    large: float | None = None  # for more than 20B parameters; None: the same


_TRL = "TRL's {}Config"
_FACTORY = "LLaMA-Factory's qwen3_lora_{}.yaml"
_PREFERENCE = Rate(5e-6, _FACTORY.format("dpo")), Rate(1e-6, _TRL.format("DPO"))
_ONLINE = Rate(1e-5, "TRL's guide to LoRA"), Rate(1e-6, _TRL.format("GRPO"))
RATES: Mapping[str, tuple[Rate, Rate]] = {
    "sft": (Rate(2e-4, "arXiv:2305.14314, table 9", 1e-4), Rate(2e-5, _TRL.format("SFT"), 1e-5)),
    "reward": (Rate(1e-4, _FACTORY.format("reward")), Rate(9e-6, "OpenRLHF's train_rm")),
    "dpo": _PREFERENCE,
    "kto": _PREFERENCE,
    "simpo": (_PREFERENCE[0], Rate(5e-7, "arXiv:2405.14734")),
    "orpo": (Rate(8e-5, "TRL's orpo.py"), Rate(8e-6, "TRL's orpo.py")),
    **dict.fromkeys(ONLINE, _ONLINE),
}
"""Learning rate of adapters and of full fine-tuning, by objective."""
_TOY_RATES: Mapping[str, tuple[float, float]] = {
    "sft": (2e-3, 3e-4),
    "reward": (1e-3, 1e-3),
    "orpo": (1e-3, 1e-3),
    **dict.fromkeys(("dpo", "kto", "simpo"), (5e-4, 5e-4)),
    **dict.fromkeys(ONLINE, (1e-3, 2e-4)),
}
_METHODS = {"none": "full", "lora": "LoRA", "qlora": "QLoRA"}


def _lr(get: Get) -> Default:
    objective, kind = get("train.objective"), get("peft.kind")
    if _toy(get):
        return Default(_TOY_RATES[objective][kind == "none"], _EMBEDDED)
    rate, what = RATES[objective][kind == "none"], f"{_METHODS[kind]} {objective}"
    if rate.large is None:
        return Default(rate.value, f"{what}: {rate.source}")
    parameters = get("model.parameters")
    if parameters is None:
        once = f"{rate.value:g} once config.json is at hand and says up to 20B"
        return Default(rate.large, f"{what} with a model of unknown size, {once}: {rate.source}")
    is_large = parameters > _LARGE
    what += f" {'above' if is_large else 'up to'} 20B parameters"
    return Default(rate.large if is_large else rate.value, f"{what}: {rate.source}")


def _of_algorithm(option: str) -> Callable[[Get], Default]:
    def rule(get: Get) -> Default:
        name = get("train.objective")
        return Default(ALGORITHMS.get(name, _GROUPS)[option], f"train.objective={name}")

    return rule


def _offload_trainer(get: Get) -> Default:
    if not has_gpu(get("train.device")):
        return Default(False, "ranks on CPUs")
    if get("rollout.engine") != "vllm":
        return Default(False, "no vLLM beside the trainer")
    if get("peft.kind") != "none":
        return Default(False, "an adapter, whose optimizer states are small")
    if get("zero.stage") < 1 or get("zero.offload_optimizer") != "none":
        return Default(False, "ZeRO-0, or an optimizer in host memory")
    return Default(True, "full fine-tuning beside vLLM on GPUs")


RULES: Mapping[str, Callable[[Get], Default]] = {
    "model.kind": _model_kind,
    "model.dtype": _dtype,
    "data.kind": _data_kind,
    "data.messages_key": _messages_key,
    "train.nproc": _nproc,
    "train.micro_batch_size": _micro_batch_size,
    "train.global_batch_size": _global_batch_size,
    "train.lr": _lr,
    "train.max_len": _tokens(256, 2048, "as LLaMA-Factory's examples"),
    "train.gradient_checkpointing": _gradient_checkpointing,
    **{f"rl.{option}": _of_algorithm(option) for option in _GROUPS},
    "rollout.max_prompt_len": _tokens(256, 1024, "as OpenRLHF", share=0.5),
    "rollout.max_new_tokens": _tokens(64, 1024, "as OpenRLHF", share=0.5),
    "rollout.offload_trainer": _offload_trainer,
    "smoke.max_new_tokens": _tokens(64, 512, "room for a complete response", share=0.25),
}
"""Rule of each computed default, by key."""
