"""The configuration's schema: every key, its type, its unit, its default.

`flows/config.py` hands it to Hydra, which then refuses a key that is not here and a value of
another type. What a type cannot say (ranges, what goes together) is the preflight's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


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


class Objective(Enum):
    """What training optimises."""

    sft = auto()
    reward = auto()
    dpo = auto()
    kto = auto()
    orpo = auto()
    simpo = auto()


class Optimizer(Enum):
    """AdamW, with its two moments in fp32 or in blocks of 8 bits (arXiv:2110.02861)."""

    adamw = auto()
    adamw_8bit = auto()


class Scheduler(Enum):
    """Learning rate after the warm-up."""

    cosine = auto()
    cosine_with_min_lr = auto()
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
    """Drift limits, see `tasks/fingerprint.py`."""

    strict = auto()
    standard = auto()
    relaxed = auto()


@dataclass
class Model:
    """The base model."""

    kind: ModelKind = ModelKind.toy
    path: str | None = None  # folder or Hugging Face id; kind hf
    revision: str | None = None  # branch, tag or commit of a Hugging Face id
    dtype: Dtype = Dtype.bfloat16
    attn_implementation: Attention = Attention.sdpa
    trust_remote_code: bool = False  # runs Python that the model's author wrote
    new_tokens: list[str] = field(default_factory=list)  # texts that become tokens, and are trained
    vocab_multiple: int = 1  # rows of a vocabulary that grew are a multiple of this
    steps: int = 400  # pre-training steps; kind toy
    seed: int = 0  # corpus, weights and order; kind toy


@dataclass
class DataSource:
    """One of several sources; what is null is as in section `data`."""

    path: str = "???"  # to be given: file, or `datasets` id for kind hub
    kind: DataKind | None = None
    split: str | None = None  # kind hub
    probability: float | None = None  # of a row to come from here; all sources or none
    max_samples: int | None = None  # rows read in one pass at most
    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    system_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    label_key: str | None = None
    margin_key: str | None = None


@dataclass
class Data:
    """What to learn from and to be tested on. The objective says which columns are read."""

    kind: DataKind = DataKind.toy
    path: str | None = None  # file; kinds jsonl, csv, parquet
    eval_path: str | None = None  # file of held-out rows; null: eval_fraction
    name: str | None = None  # `datasets` id; kind hub
    split: str = "train"  # kind hub
    eval_split: str | None = None  # kind hub; null: eval_fraction
    eval_fraction: float = 0.05  # share of the rows that is held out
    messages_key: str | None = "messages"  # column with a list of messages
    prompt_key: str = "prompt"  # these two where there is no column of messages
    response_key: str = "response"
    system_key: str | None = None  # column with a system message
    chosen_key: str = "chosen"  # pairs: answer or whole conversation
    rejected_key: str = "rejected"
    margin_key: str | None = None  # pairs: column with a number, for the reward objective
    label_key: str = "label"  # kto: column with true or false
    sources: list[DataSource] = field(default_factory=list)  # instead of path
    stopping: Stopping = Stopping.all_exhausted  # of sources with probabilities
    max_samples: int | None = None  # rows read at most; null: all
    on_bad_line: OnBadLine = OnBadLine.fail
    chat_template: str | None = None  # Jinja file; null: the tokenizer's own
    seed: int = 0  # which rows are held out; kind toy: which rows there are
    train_size: int = 4000  # rows; kind toy
    heldout_size: int = 300  # rows; kind toy


@dataclass
class Loss:
    """Knobs of the objectives; null leaves one at its default. Which objective has which:
    `tasks/training/objectives/`; one that the objective does not have is refused.
    """

    kind: str | None = None  # reward: sigmoid, log_exp; dpo: sigmoid, ipo
    beta: float | None = None  # dpo, kto, orpo, simpo
    gamma: float | None = None  # simpo: margin of the rewards
    margin: float | None = None  # reward: added to the pairs' own margins
    center: float | None = None  # reward: weight of the squared sum of scores
    label_smoothing: float | None = None  # dpo: share of wrong labels (cDPO)
    nll: float | None = None  # dpo, simpo: weight of the chosen answer's cross-entropy
    desirable_weight: float | None = None  # kto
    undesirable_weight: float | None = None  # kto


@dataclass
class Train:
    """Optimisation and how it is started."""

    objective: Objective = Objective.sft
    loss: Loss = field(default_factory=Loss)
    nproc: int = 2  # ranks a node
    nodes: int = 1
    threads: int | None = None  # CPU threads a rank; null: cores / nproc
    micro_batch_size: int = 32  # samples a rank holds at once
    global_batch_size: int = 64  # samples an optimizer step
    epochs: float = 1.0
    max_steps: int | None = None  # optimizer steps; wins over epochs
    optimizer: Optimizer = Optimizer.adamw
    lr: float = 2e-4  # peak
    scheduler: Scheduler = Scheduler.cosine
    warmup_ratio: float = 0.03  # share of the steps
    min_lr_ratio: float = 0.0  # last lr over lr; *_min_lr, polynomial, warmup_stable_decay
    decay_ratio: float = 0.1  # share of the steps that lr falls in; warmup_stable_decay
    power: float = 1.0  # polynomial
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    max_len: int = 256  # tokens a sample
    on_overlong: OnOverlong = OnOverlong.truncate
    mask: Mask = Mask.last_answer  # objective sft; the others learn from last answers
    gradient_checkpointing: bool = False
    gradient_checkpointing_reentrant: bool = False
    log_every: int = 1  # steps
    eval_steps: int = 0  # steps between evaluations; 0: only before the first and after the last
    best_metric: str = "loss"  # what the best checkpoint is best in: loss, accuracy, margin, ...
    early_stop_patience: int = 0  # evaluations without improvement until training ends; 0: never
    keep: Keep = Keep.last  # which state is delivered
    save_steps: int = 50  # steps between checkpoints to go on from; 0: none
    max_ckpt_num: int = 3  # checkpoints that stay, beside best and last; 0: all
    max_ckpt_gb: float | None = None  # GB (10^9 bytes) of them together; null: any
    keep_ckpts: bool = False  # after training has succeeded, too
    resume: str = "auto"  # auto: from the newest checkpoint of this very run; never; or its folder
    timeout_s: float | None = None  # of the whole stage
    collective_timeout_s: float = 1800.0  # that ranks wait for each other
    probes: int = 32  # conversations that the fingerprint is taken on


@dataclass
class Peft:
    """The adapter (Hu et al. 2021, arXiv:2106.09685)."""

    kind: PeftKind = PeftKind.none
    rank: int = 64
    alpha: float = 64.0  # the update is scaled by alpha / rank, or by alpha / sqrt(rank)
    dropout: float = 0.0
    target_modules: Any = "all-linear"  # or a list of module names, e.g. [q_proj,v_proj]
    exclude_modules: list[str] = field(default_factory=list)  # taken out of the targets
    use_rslora: bool = False  # scale by alpha / sqrt(rank), arXiv:2312.03732
    use_dora: bool = False  # train each row's magnitude too, arXiv:2402.09353
    init: AdapterInit = AdapterInit.default
    pissa_niter: int | None = None  # init pissa: iterations of a randomised SVD; null: exact
    rank_pattern: Any = None  # other ranks by module name, e.g. {q_proj: 16, layers.0.mlp: 4}
    alpha_pattern: Any = None  # other alphas, likewise
    modules_to_save: list[str] = field(default_factory=list)  # trained whole, saved with it
    quant_type: QuantType = QuantType.nf4
    double_quant: bool = True  # kind qlora: quantise the block scales too


@dataclass
class Zero:
    """DeepSpeed's ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    stage: int = 2  # 0 to 3
    offload_optimizer: Offload = Offload.none  # stage 1 and up
    offload_param: Offload = Offload.none  # stage 3
    overlap_comm: bool = False
    bucket_size: int = 50_000_000  # elements
    persistence_threshold: int = 100_000  # stage 3: elements up to which a parameter stays whole


@dataclass
class Merge:
    """How an adapter becomes weights."""

    base: MergeBase = MergeBase.auto


@dataclass
class Convert:
    """What is served."""

    dtype: Dtype = Dtype.bfloat16
    max_shard_size: str = "5GB"
    quantize: Quantize = Quantize.none


@dataclass
class Smoke:
    """The test of the served model; see `tasks/smoke_eval.py: SmokeSettings`."""

    engine: Engine = Engine.vllm
    greedy_tokens: int = 5
    max_new_tokens: int = 64
    eval_samples: int = 200
    kv_cache_gib: int = 1  # on CPU
    max_model_len: int | None = None  # tokens; null: what the prompts need
    timeout_s: float = 900.0
    min_stop_rate: float = 0.9  # share of answers that end by themselves
    max_degenerate_rate: float = 0.02  # share of answers caught in a loop
    threads: int | None = None  # CPU threads


@dataclass
class Gate:
    """What has to hold before a run is registered as a candidate."""

    profile: Profile = Profile.standard
    min_eval_gain: float | None = None  # points of exact match; null: none


@dataclass
class Tracking:
    """MLflow."""

    uri: str | None = None  # null: SQLite under paths.runs
    experiment: str = "plumbline"
    model_name: str = "plumbline"  # in the model registry
    tensorboard: bool = False  # event files under paths.runs/tensorboard too


@dataclass
class Paths:
    """Where things go."""

    runs: str = "runs"
    wait_s: float = 0.0  # how long to wait for another run in the same folder


@dataclass
class Rlhf:
    """The whole configuration of `flows/rlhf.py`."""

    plan: bool = False
    force: list[str] = field(default_factory=list)  # stages to run anew, by name
    tag: str = ""
    seed: int = 0
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    peft: Peft = field(default_factory=Peft)
    zero: Zero = field(default_factory=Zero)
    merge: Merge = field(default_factory=Merge)
    convert: Convert = field(default_factory=Convert)
    smoke: Smoke = field(default_factory=Smoke)
    gate: Gate = field(default_factory=Gate)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
