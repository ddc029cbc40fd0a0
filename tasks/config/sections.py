"""Sections of the configuration: frozen dataclasses, of which the ranks hold instances.

The annotations are what pydantic checks (`flows/cli/composed.py`), the defaults are those of Hydra,
and the comments behind the fields are the help text. `Rlhf` and `Deliver` are the whole
configurations of the two flows; `tasks/config/tools.py` has those of the other commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from annotated_types import Ge, Interval

from tasks.config.defaults import COMPUTED
from tasks.core.errors import ConfigError

MISSING = "???"
"""Marks a value that the user has to give, for OmegaConf."""
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, le=1e12)]
NonNegative = Annotated[float, Interval(ge=0, le=1e12)]
Share = Annotated[float, Interval(ge=0, le=1)]
LessThanHalf = Annotated[float, Interval(ge=0, lt=0.5)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
Rate = Annotated[float, Interval(gt=0, le=10)]
"""A learning rate."""
Decay = Annotated[float, Interval(ge=0, lt=1)]
"""Share of a moment that AdamW keeps at each step."""
ZeroStage = Annotated[int, Interval(ge=0, le=3)]
Staleness = Annotated[int, Interval(ge=0, le=1)]

Dtype = Literal["bfloat16", "float16", "float32"]
Quantize = Literal[
    "none", "w8a8", "fp8",
    "gguf:f16", "gguf:bf16", "gguf:q8_0", "gguf:q6_k", "gguf:q5_k_m", "gguf:q4_k_m",
]  # fmt: skip
"""Number formats of the linear layers that are served; `gguf:` for llama.cpp, all its weights."""
QuantizeProfile = Literal["auto", "int8", "fp8", "int4", "relaxed", "standard"]
"""Drift limits of quantised models, see `tasks/drift/fingerprint.py`."""
Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""transformers' `attn_implementation`."""
DataKind = Literal["toy", "jsonl", "csv", "parquet", "hub"]
ControlTokens = Literal["refuse", "keep"]
Mask = Literal["last_answer", "every_answer", "every_token"]
"""Tokens of a conversation that bear loss; `every_token` is for raw texts, as in pre-training."""
OnOverlong = Literal["truncate", "refuse", "split"]
"""`split` is for raw texts: they are cut into pieces, so that nothing is left out."""
Objective = Literal[
    "sft", "reward", "dpo", "kto", "orpo", "simpo",
    "ppo", "grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo",
]  # fmt: skip
Scheduler = Literal[
    "cosine", "cosine_with_min_lr", "cosine_with_restarts", "linear", "polynomial", "inverse_sqrt",
    "warmup_stable_decay", "constant_with_warmup", "constant",
]  # fmt: skip
"""transformers' names; `constant` has no warm-up, whatever `train.warmup_ratio` says."""
PeftKind = Literal["none", "lora", "qlora"]
QuantType = Literal["nf4", "fp4"]
"""4-bit code books of QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""
Device = Literal["auto", "cpu", "cuda"]
Offload = Literal["none", "cpu"]
KlIn = Literal["reward", "loss"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "tis", "icepop", "sequence_mask"]
Rounding = Literal["unbiased", "nearest"]
Engine = Literal["vllm", "server"]
"""`server`: vLLM servers over HTTP."""
SmokeEngine = Literal["vllm", "server", "transformers"]
"""`server` is `vllm serve`, verified over HTTP as a user reaches it."""
Profile = Literal["strict", "standard", "relaxed"]
"""Drift limits, see `tasks/drift/fingerprint.py`."""
T = TypeVar("T")


class Section:
    """Base of all sections. Unknown keys are refused, and a number is a text where text is due."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "coerce_numbers_to_str": True}


def read_section(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    """Return a section of the configuration as its dataclass; lists become tuples.

    Fields that are dataclasses are read likewise. Raises ConfigError for an unknown key.
    """
    types = get_type_hints(kind)
    if unknown := sorted(set(values) - {f.name for f in fields(kind)}):  # type: ignore[arg-type]
        raise ConfigError(f"{name}.{unknown[0]} is not a setting of this section")
    return kind(**{key: _read(types[key], value, f"{name}.{key}") for key, value in values.items()})


def _read(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return read_section(kind, value, name)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Origin(Section):
    """Place of the base model."""

    kind: Literal["toy", "hf"] = COMPUTED  # hf if there is a path, else toy
    path: str | None = None  # folder or Hugging Face id; kind hf
    revision: str | None = None  # branch, tag or commit of a Hugging Face id


@dataclass(frozen=True)
class Loading(Section):
    """Settings of the model that the ranks load."""

    dtype: Dtype = "bfloat16"  # what the ranks compute in
    attn_implementation: Attention = "sdpa"  # flash_attention_2 needs flash-attn
    trust_remote_code: bool = False  # runs Python that the model's author wrote
    new_tokens: tuple[str, ...] = ()  # texts that become tokens, and are trained


# Fields of a dataclass come in the order of its bases from last to first.
@dataclass(frozen=True)
class Model(Loading, Origin):
    """The base model."""

    dtype: Dtype = COMPUTED  # what training and vLLM compute in; default: what this machine does
    steps: Natural = 400  # pre-training steps; kind toy
    seed: int = 0  # corpus, weights and order; kind toy


@dataclass(frozen=True)
class DataSource(Section):
    """One of several sources; null: as in section `data`."""

    path: str  # file, or `datasets` id for kind hub
    kind: Literal["jsonl", "csv", "parquet", "hub"] | None = None
    split: str | None = None  # kind hub
    probability: float | None = None  # of a row to come from here; for all sources or for none
    max_samples: Count | None = None  # rows read in one pass, at most
    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    system_key: str | None = None
    text_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    label_key: str | None = None
    margin_key: str | None = None
    answer_key: str | None = None


@dataclass(frozen=True)
class Data(Section):
    """Rows to learn from and to evaluate on. The objective decides which columns are read."""

    kind: DataKind = COMPUTED  # by the suffix of path; hub if there is a name; else toy
    path: str | None = None  # file; kinds jsonl, csv, parquet
    eval_path: str | None = None  # file of held-out rows; null: eval_fraction
    name: str | None = None  # `datasets` id; kind hub
    split: str = "train"  # kind hub
    eval_split: str | None = None  # kind hub; null: eval_fraction
    eval_fraction: PositiveShare = 0.05  # share of the rows that is held out
    messages_key: str | None = COMPUTED  # column with a list of messages; csv: none
    prompt_key: str = "prompt"  # column with the prompt, if there is no column of messages
    response_key: str = "response"  # column with the response, beside prompt_key
    system_key: str | None = None  # column with a system message
    text_key: str | None = None  # column with raw text, instead of all these: as in pre-training
    chosen_key: str = "chosen"  # pairs: response or whole conversation
    rejected_key: str = "rejected"  # pairs: response or whole conversation
    margin_key: str | None = None  # pairs: column with a number, for the reward objective
    label_key: str = "label"  # kto: column with true or false
    answer_key: str | None = "answer"  # prompts: column with the reference answer, if it exists
    sources: list[DataSource] = field(default_factory=list)  # several sources, instead of path
    stopping: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"  # end of a mixture
    max_samples: Count | None = None  # rows read, at most; null: all
    ignored_columns: tuple[str, ...] = ()  # that training leaves out although they carry meaning
    on_bad_line: Literal["fail", "skip"] = "fail"  # what happens to a row that cannot be used
    control_tokens: ControlTokens | None = None  # in texts; null: refuse in answers, else warn
    max_truncated: Share = 0.2  # share of training rows that train.max_len may cut; more: an error
    chat_template: str | None = None  # Jinja file; null: the tokenizer's own
    seed: int = 0  # selects the held-out rows; kind toy: all rows
    tasks: Literal["letters", "calculator"] = "letters"  # for rl.environment=calculator: sums
    train_size: Count = 2240  # rows; kind toy: 70 steps of 32
    heldout_size: Count = 300  # rows; kind toy


@dataclass(frozen=True)
class Loss(Section):
    """Options of the objectives; null: the objective's default. An option that the objective does
    not have is refused, see `tasks/training/losses.py`.
    """

    kind: Literal["sigmoid", "ipo"] | None = None  # dpo
    beta: float | None = None  # dpo, kto, orpo, simpo
    gamma: float | None = None  # simpo: margin of the rewards
    margin: float | None = None  # reward: added to the pairs' own margins
    center: float | None = None  # reward: weight of the squared sum of scores
    label_smoothing: LessThanHalf | None = None  # dpo: share of wrong labels (cDPO)
    nll: float | None = None  # dpo, simpo: weight of the chosen response's cross-entropy
    desirable_weight: float | None = None  # kto: weight of desirable responses
    undesirable_weight: float | None = None  # kto: weight of undesirable responses


@dataclass(frozen=True)
class Training(Section):
    """The objective and its passes, and how often a step is logged and saved."""

    objective: Objective = "sft"  # what training optimises
    loss: Loss = field(default_factory=Loss)
    router_aux_loss_coef: NonNegative | None = None  # load balance of experts; null: config.json's
    mask: Mask = "every_answer"  # objective sft: tokens that bear loss
    gradient_checkpointing: bool = COMPUTED  # recompute activations; true for real models
    gradient_checkpointing_reentrant: bool = False  # torch's older variant of it
    log_every: Count = 1  # steps
    save_steps: Natural = 50  # steps between checkpoints; even a short run has one; 0: none
    max_ckpt_num: Natural = 3  # checkpoints that are kept, beside best and last; 0: all
    probes: Count = 32  # conversations that the fingerprint is taken on


@dataclass(frozen=True)
class Launch(Section):
    """Number of ranks, where they compute, and their time limits."""

    device: Device = "auto"  # auto: GPUs if there are any; cpu: leaves them alone
    nproc: Count = COMPUTED  # ranks per node; default: number of visible GPUs, 2 without
    nodes: Count = 1  # machines
    threads: Count | None = None  # CPU threads per rank; null: cores / nproc
    sequence_parallel: Count = 1  # ranks that share each row's tokens, for long samples (Ulysses)
    timeout_s: Positive | None = None  # seconds for the whole stage; null: no limit
    collective_timeout_s: Positive = 1800.0  # seconds that ranks wait for each other


@dataclass(frozen=True)
class Batch(Section):
    """Samples of an optimizer step, and number of steps."""

    micro_batch_size: Count = COMPUTED  # samples in one forward pass of a rank
    global_batch_size: Count = COMPUTED  # samples per optimizer step, over all ranks
    epochs: Positive = 1.0  # passes over the training rows
    max_steps: Count | None = None  # optimizer steps; wins over epochs
    max_len: Count = COMPUTED  # tokens per sample; default 2048, or the model's context
    on_overlong: OnOverlong = "truncate"  # what happens to longer samples; split: raw texts

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches that a rank accumulates before a step.

        Raises ConfigError if the sizes do not divide.
        """
        together = self.micro_batch_size * world_size
        if together <= 0 or self.global_batch_size % together:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} is not a multiple of "
                f"train.micro_batch_size={self.micro_batch_size} x {world_size} ranks",
                hint=f"train.global_batch_size={max(together, 1)} or a multiple of it",
            )
        return self.global_batch_size // together


@dataclass(frozen=True)
class Optim(Section):
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"  # or 8-bit moments, arXiv:2110.02861
    lr: Rate = COMPUTED  # peak learning rate; default by objective, adapter and model size
    scheduler: Scheduler = "cosine"  # learning rate after the warm-up
    warmup_ratio: Share = 0.03  # share of the steps
    min_lr_ratio: Share = 0.0  # last lr over lr; *_min_lr, polynomial, warmup_stable_decay
    decay_ratio: PositiveShare = 0.1  # share of the steps that lr falls in; warmup_stable_decay
    power: Positive = 1.0  # exponent of the decay; polynomial
    num_cycles: Count = 1  # decays from the peak; cosine_with_restarts
    weight_decay: NonNegative = 0.0  # of AdamW
    beta1: Decay = 0.9  # of AdamW: decay of the first moment
    beta2: Decay = 0.999  # of AdamW: decay of the second moment
    eps: PositiveShare = 1e-8  # of AdamW: added to the denominator
    max_grad_norm: NonNegative = 1.0  # gradients are clipped to this norm


@dataclass(frozen=True)
class Evaluate(Section):
    """Evaluations during training, and what follows from them."""

    eval_steps: Natural = 0  # steps between evaluations; 0: only before and after training
    best_metric: str = "loss"  # metric of the best checkpoint: loss, accuracy, margin, ...
    early_stop_patience: Natural = 0  # evaluations without improvement that end it; 0: never
    keep: Literal["last", "best"] = "last"  # checkpoint that is delivered


@dataclass(frozen=True)
class Resume(Section):
    """Saving and resuming, which do not change the result of a run."""

    keep_ckpts: bool = False  # keep checkpoints after training has succeeded
    resume: str = "auto"  # auto: newest checkpoint of this run; never; or a checkpoint's folder


# Fields of a dataclass come in the order of its bases from last to first.
@dataclass(frozen=True)
class Train(Resume, Evaluate, Optim, Batch, Launch, Training):
    """Optimisation and how it is started."""


@dataclass(frozen=True)
class Peft(Section):
    """The adapter (Hu et al. 2021, arXiv:2106.09685)."""

    kind: PeftKind = "none"  # none: full fine-tuning; lora; qlora: LoRA on a 4-bit base
    rank: Count = 64  # of the adapter
    alpha: Positive = 64.0  # the update is scaled by alpha / rank, or by alpha / sqrt(rank)
    dropout: Share = 0.0  # on the adapter's input
    target_modules: tuple[str, ...] | str = "all-linear"  # or a list, e.g. [q_proj,v_proj]
    exclude_modules: tuple[str, ...] = ()  # taken out of the targets
    use_rslora: bool = False  # scale by alpha / sqrt(rank), arXiv:2312.03732
    use_dora: bool = False  # train each row's magnitude too, arXiv:2402.09353
    init: Literal["default", "gaussian"] = "default"  # A uniform (default) or gaussian, B zero
    rank_pattern: Mapping[str, int] | None = None  # other ranks by module, e.g. {q_proj: 16}
    alpha_pattern: Mapping[str, float] | None = None  # other alphas, likewise
    modules_to_save: tuple[str, ...] = ()  # modules trained in full, saved with the adapter
    quant_type: QuantType = "nf4"  # kind qlora: 4-bit code book (arXiv:2305.14314)
    double_quant: bool = True  # kind qlora: quantise the block scales too

    def quantization(self, dtype: str) -> dict[str, Any] | None:
        """Return the base's quantisation as `train.json` has it; None if it is not quantised.

        4-bit layers compute in `dtype`, which is `model.dtype`.
        """
        if self.kind != "qlora":
            return None
        return {
            "type": self.quant_type,
            "double_quant": self.double_quant,
            "compute_dtype": dtype,
        }


@dataclass(frozen=True)
class Zero(Section):
    """DeepSpeed's ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    stage: ZeroStage = 2  # 0 to 3
    offload_optimizer: Offload = "none"  # stage 1 and up
    offload_param: Offload = "none"  # stage 3
    overlap_comm: bool | None = None  # communicate while computing; null: only ZeRO-3 on GPUs
    bucket_size: Count = 50_000_000  # elements per communication bucket
    persistence_threshold: Natural | None = None  # stage 3: parameters below this are whole


@dataclass(frozen=True)
class Rl(Section):
    """The training loop. An iteration samples, scores, estimates advantages and updates; counts are
    per iteration over all ranks. `train.global_batch_size` counts the responses of an optimizer
    step; `train.eval_steps`, `save_steps` and `log_every` count iterations. Computed
    defaults are the algorithm's: `defaults.ALGORITHMS`.
    """

    rollout_batch_size: Count = COMPUTED  # prompts per iteration
    num_generations: Count = COMPUTED  # responses per prompt, a group
    iterations: Count | None = None  # null: train.epochs over the prompts
    staleness: Staleness = 0  # 1: sample the next iteration while this one trains; server
    ppo_epochs: Count = COMPUTED  # epochs over the responses of an iteration
    eval_prompts: Count = 128  # evaluation prompts, at most
    environment: str | None = None  # path.py:Class with reset and step, for several turns
    environment_timeout_s: Positive = 60.0  # seconds for all calls of a turn
    max_turns: Count = 8  # responses of an episode, at most; with an environment
    observation_role: Literal["user", "tool"] = "user"  # role of the environment's messages
    gamma: Share = 1.0  # discount per token
    gae_lambda: Share = 0.95  # ppo: lambda of GAE (arXiv:1506.02438)
    clip_low: PositiveShare = COMPUTED  # the ratio is clipped at 1 - this
    clip_high: Positive = COMPUTED  # the ratio is clipped at 1 + this (DAPO, arXiv:2503.14476)
    dual_clip: Positive | None = None  # bound on ratio x negative advantage (arXiv:1912.09729)
    kl_coef: NonNegative = COMPUTED  # weight of the KL penalty; 0: no reference model
    kl_in: KlIn = COMPUTED  # where the KL penalty is subtracted: every token's reward, or the loss
    kl_estimator: KlEstimator = COMPUTED  # Schulman 2020, "Approximating KL divergence"
    kl_target: Positive | None = None  # nats per token, target of an adaptive kl_coef; null: fixed
    kl_horizon: Count = 10_000  # responses in which an adaptive kl_coef moves by a fifth at most
    kl_limit: Positive | None = None  # KL from the reference that ends training, nats per token
    whiten: bool = COMPUTED  # normalise the advantages of an iteration: mean 0, deviation 1
    entropy_coef: NonNegative = 0.0  # weight of the entropy bonus
    critic: Literal["shared", "separate"] = "shared"  # ppo; shared: on the policy's trunk
    critic_lr: Rate | None = None  # null: train.lr
    critic_warmup: Natural = COMPUTED  # iterations in which only the critic learns, unclipped
    value_clip: Positive | None = 0.2  # clip range of the critic's update; null: none
    refill: Natural = COMPUTED  # rounds that replace groups without signal (arXiv:2503.14476)
    mask_truncated: bool = COMPUTED  # responses that the length limit cut off bear no loss
    correction: Correction = "tis"  # importance correction of the train-inference mismatch
    correction_high: Positive = 2.0  # upper bound of the importance ratio, trainer over engine
    correction_low: Share = 0.5  # lower bound; icepop, sequence_mask
    mismatch_limit: Positive = 0.1  # train-inference mismatch that ends training, nats per token


@dataclass(frozen=True)
class Rollout(Section):
    """The engine that samples responses."""

    engine: Engine = "vllm"  # vllm in each rank, or vLLM servers
    servers: Natural = 0  # server: vLLM servers to start on free GPUs, or on CPU cores
    urls: tuple[str, ...] = ()  # server: addresses of running vLLM servers
    sync_dir: str | None = None  # server: folder they read weights from; null: memory, if local
    threads: Count | None = None  # server: CPU threads per started server; null: equal parts
    max_new_tokens: Count = COMPUTED  # tokens after the prompt; default 1024, or half the context
    max_prompt_len: Count = COMPUTED  # tokens of a prompt; same default; longer ones are refused
    temperature: Positive = 1.0  # of sampling; log-probabilities are taken at it everywhere
    top_p: PositiveShare = 1.0  # nucleus sampling; 1: all tokens
    top_k: Natural = 0  # sample among the k most likely tokens; 0: all
    tensor_parallel: Count = 1  # ranks per engine; server: GPUs per started server
    kv_cache_gib: Positive = 1.0  # GiB of KV cache per engine, on CPU
    gpu_memory: PositiveShare = 0.5  # share of a GPU that the engine may take
    max_num_seqs: Count = 256  # responses that an engine decodes at once
    offload_trainer: bool = COMPUTED  # optimizer states in host memory except during updates
    timeout_s: Positive | None = None  # seconds per iteration; null: by the size of the weights

    @property
    def cut(self) -> bool:
        """True if unlikely tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Reward(Section):
    """Rewards of the responses: the weighted sum of all sources."""

    model: str | None = None  # folder of a reward model; in a chain: the step before
    model_weight: float = 1.0  # of the reward model's score in the sum
    normalize: bool = True  # subtract the model's own mean, divide by its deviation
    function: str | None = None  # path.py:name, or exact_match
    function_weight: float = 1.0  # of the function's reward in the sum
    url: str | None = None  # HTTP endpoint that scores responses
    url_weight: float = 1.0  # of the endpoint's reward in the sum
    timeout_s: Positive = 60.0  # seconds per call of the function or the endpoint
    retries: Natural = 2  # of a failed request
    batch: Count = 64  # responses per request


@dataclass(frozen=True)
class Merge(Section):
    """Merging an adapter into its base weights."""

    base: Literal["auto", "dequantized", "original"] = "auto"  # auto: as the adapter was trained
    rounding: Rounding = "unbiased"  # nearest: as other tools; loses updates below half a step


@dataclass(frozen=True)
class Convert(Section):
    """The files that are served."""

    dtype: Dtype = "bfloat16"  # number format of the served files
    max_shard_size: str = "5GB"  # size of one weight file, e.g. 500MB
    quantize: Quantize = "none"  # also make a version whose linear layers have this format
    quantize_profile: QuantizeProfile = "auto"  # drift limits of that version; auto: by format
    llama_cpp: str | None = None  # gguf: folder of llama.cpp, built; null: its programs on PATH
    max_eval_drop: NonNegative | None = 5.0  # points of exact match that it may lose; null: any


@dataclass(frozen=True)
class Served(Section):
    """The engine of a test of the served model."""

    kv_cache_gib: Count = 1  # GiB of KV cache, on CPU
    max_model_len: Count | None = None  # tokens; null: what the prompts need
    timeout_s: Positive | None = None  # seconds for the whole test; null: by the weights' size
    threads: Count | None = None  # CPU threads


@dataclass(frozen=True)
class Smoke(Served):
    """The test of the served model."""

    engine: SmokeEngine = "vllm"  # loads the served model; server: `vllm serve`, over HTTP
    max_new_tokens: Count = COMPUTED  # default 512, or a quarter of the model's context
    eval_samples: Natural = 200  # held-out rows that are evaluated
    min_stop_rate: Share = 0.9  # share of responses that end by themselves, at least
    max_degenerate_rate: Share = 0.02  # share caught in a loop, at most, or as before training
    tensor_parallel: Count = 1  # processes that share the model, each on a GPU of its own


@dataclass(frozen=True)
class Eval(Section):
    """Further measures of the served model, beside those of section `smoke`."""

    function: str | None = None  # path.py:name; a number per response, higher is better
    timeout_s: Positive = 600.0  # seconds for a call, which gets all responses of a model
    lm_eval: list[str] = field(default_factory=list)  # tasks of lm-evaluation-harness: names, files
    lm_eval_limit: Count | None = None  # rows of each of them; null: all


@dataclass(frozen=True)
class Gate(Section):
    """Conditions that a run has to meet; its model stays a candidate otherwise."""

    profile: Profile = "standard"  # drift limits, see `tasks/drift/fingerprint.py`
    min_eval_gain: float | None = None  # points of exact match; null: none
    conditions: dict[str, str] | None = None  # limits of numbers: docs/training.md; null: none


@dataclass(frozen=True)
class Register(Section):
    """Registering the served model."""

    promote: bool = False  # true: `champion` names the model if the gate passes


@dataclass(frozen=True)
class Server(Section):
    """MLflow."""

    uri: str | None = "${oc.env:MLFLOW_TRACKING_URI,null}"  # null: SQLite under paths.runs
    experiment: str = "plumbline"  # MLflow experiment of the runs


@dataclass(frozen=True)
class Tracking(Server):
    """MLflow and its model registry."""

    model_name: str = "plumbline"  # in the model registry


@dataclass(frozen=True)
class Paths(Section):
    """Folders."""

    runs: str = "${oc.env:PLUMBLINE_RUNS,runs}"  # folder for artifacts, MLflow, Prefect and logs
    wait_s: NonNegative | None = None  # seconds to wait for other runs; null: as long as it takes


@dataclass(frozen=True)
class HandOffTimeouts(Section):
    """Time limits of the stages after training, in seconds; null: no limit."""

    gather_s: Positive | None = None  # joining the partitions
    merge_s: Positive | None = None  # the merge
    convert_s: Positive | None = None  # the served files
    quantize_s: Positive | None = None  # the quantised files


@dataclass(frozen=True)
class Timeouts(HandOffTimeouts):
    """Time limits of stages, in seconds; null: none. train and smoke have one of their own."""

    prepare_data_s: Positive | None = None  # reading the data
    prepare_base_s: Positive | None = None  # the base
    rollout_base_s: Positive | None = None  # the base of rollouts
    lm_eval_s: Positive | None = None  # lm-evaluation-harness


@dataclass(frozen=True)
class DeliverTimeouts(HandOffTimeouts):
    """Time limits of stages, in seconds; null: none. The test has smoke.timeout_s."""

    reference_s: Positive | None = None  # the first fingerprint; null: half an hour


@dataclass(frozen=True)
class Rlhf(Section):
    """The whole configuration of `flows/rlhf.py`."""

    plan: bool = False  # true: print what would be done, start nothing
    force: list[str] = field(default_factory=list)  # stages to run again, by name
    tag: str = ""  # free text that tells runs apart
    seed: int = 0  # of training
    steps: dict[str, list[str]] = field(default_factory=dict)  # overrides of each, by its name
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    peft: Peft = field(default_factory=Peft)
    zero: Zero = field(default_factory=Zero)
    rl: Rl = field(default_factory=Rl)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    merge: Merge = field(default_factory=Merge)
    convert: Convert = field(default_factory=Convert)
    smoke: Smoke = field(default_factory=Smoke)
    eval: Eval = field(default_factory=Eval)
    gate: Gate = field(default_factory=Gate)
    register: Register = field(default_factory=Register)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True)
class DeliverMerge(Merge):
    """Merging an adapter into its base weights."""

    quant_type: QuantType = "nf4"  # base=dequantized: code book, if training left no record
    double_quant: bool = True  # base=dequantized: block scales in 8 bits, likewise


DeliverEngine = Literal["vllm", "server", "transformers", "none"]


@dataclass(frozen=True)
class DeliverSmoke(Served):
    """The test of the served model."""

    engine: DeliverEngine = "vllm"  # server: `vllm serve`, over HTTP; none: no test, no Prefect
    probes: Count = 32  # texts that the fingerprints are taken on
    texts: str | None = None  # file, one text per line; null: built-in ones
    profile: Profile = "standard"  # drift limits


@dataclass(frozen=True)
class Deliver(Section):
    """The whole configuration of `flows/deliver.py`."""

    source: str = MISSING  # folder: adapter, model, our shards, DeepSpeed checkpoint
    base: str | None = None  # folder of the base model; null: what SOURCE itself names
    out: str = MISSING  # folder to write the served model to
    adapter_config: str | None = None  # adapter_config.json; null: the one in or above SOURCE
    check_base: bool = True  # false: accept a base that is recorded as another one
    overwrite: bool = False  # true: replace an OUT that an earlier delivery wrote
    plan: bool = False  # true: print what would be done, write nothing
    force: list[str] = field(default_factory=list)  # stages to run again, by name
    tag: str = ""  # free text that tells runs apart
    merge: DeliverMerge = field(default_factory=DeliverMerge)
    convert: Convert = field(default_factory=Convert)
    smoke: DeliverSmoke = field(default_factory=DeliverSmoke)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
    timeouts: DeliverTimeouts = field(default_factory=DeliverTimeouts)


def engine_dtype(settings: Mapping[str, Any]) -> str:
    """Return the torch name of the dtype in which the engine of the smoke test computes."""
    dtype = "float32" if settings["model"]["dtype"] == "float32" else settings["convert"]["dtype"]
    return str(dtype)
