"""The words that settings are chosen among."""

from __future__ import annotations

from enum import Enum, auto


class Dtype(Enum):
    """Number format of weights and activations."""

    bfloat16 = auto()
    float16 = auto()
    float32 = auto()


class Quantize(Enum):
    """Number format of the linear layers that are served."""

    none = auto()
    w8a8 = auto()
    fp8 = auto()


class Attention(Enum):
    """transformers' `attn_implementation`."""

    sdpa = auto()
    eager = auto()
    flash_attention_2 = auto()
    flash_attention_3 = auto()
    flex_attention = auto()


class ModelKind(Enum):
    """Where the base model comes from."""

    toy = auto()
    hf = auto()


class DataKind(Enum):
    """Where the conversations come from."""

    toy = auto()
    jsonl = auto()
    csv = auto()
    parquet = auto()
    hub = auto()


class OnBadLine(Enum):
    """What a row that cannot be used leads to."""

    fail = auto()
    skip = auto()


class Mask(Enum):
    """Which tokens of a conversation bear loss."""

    last_answer = auto()
    every_answer = auto()
    every_token = auto()  # as in pre-training


class Stopping(Enum):
    """When mixing sources by probability ends."""

    first_exhausted = auto()
    all_exhausted = auto()


class OnOverlong(Enum):
    """What a sequence longer than `train.max_len` leads to."""

    truncate = auto()
    refuse = auto()
    split = auto()  # raw texts: into pieces, so that nothing is left out


class Objective(Enum):
    """What training optimises."""

    sft = auto()
    reward = auto()
    dpo = auto()
    kto = auto()
    orpo = auto()
    simpo = auto()
    ppo = auto()
    grpo = auto()
    dr_grpo = auto()
    rloo = auto()
    reinforce_pp = auto()
    reinforce_pp_baseline = auto()
    gspo = auto()


class Optimizer(Enum):
    """AdamW, with its two moments in fp32 or in blocks of 8 bits (arXiv:2110.02861)."""

    adamw = auto()
    adamw_8bit = auto()


class Scheduler(Enum):
    """Learning rate after the warm-up."""

    cosine = auto()
    cosine_with_min_lr = auto()
    cosine_with_restarts = auto()
    linear = auto()
    polynomial = auto()
    inverse_sqrt = auto()
    warmup_stable_decay = auto()
    constant_with_warmup = auto()
    constant = auto()  # from the first step on, whatever train.warmup_ratio says


class Keep(Enum):
    """Which state of a training run goes on."""

    last = auto()
    best = auto()


class PeftKind(Enum):
    """What is trained: everything, an adapter, or an adapter on a 4-bit base."""

    none = auto()
    lora = auto()
    qlora = auto()


class QuantType(Enum):
    """4-bit code book of QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""

    nf4 = auto()
    fp4 = auto()


class AdapterInit(Enum):
    """How an adapter begins: A at random and B zero (`default`: uniform, `gaussian`: normal), or in
    the base's largest singular vectors (Meng et al. 2024, arXiv:2404.02948).
    """

    default = auto()
    gaussian = auto()
    pissa = auto()


class Device(Enum):
    """Device of the ranks; auto: the GPUs that are there, else the CPU."""

    auto = 1  # a member named like the function: numbers here
    cpu = 2
    cuda = 3


class Offload(Enum):
    """Where ZeRO keeps a state."""

    none = auto()
    cpu = auto()


class MergeBase(Enum):
    """What an adapter is folded into; `auto` is `dequantized` for QLoRA, else `original`."""

    auto = 1  # a member named like the function: numbers here
    dequantized = 2
    original = 3


class Engine(Enum):
    """What loads the served model for the smoke test."""

    vllm = auto()
    transformers = auto()


class Profile(Enum):
    """Drift limits, see `tasks/drift/fingerprint.py`."""

    strict = auto()
    standard = auto()
    relaxed = auto()
