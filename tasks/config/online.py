"""Sections `rl`, `rollout` and `reward`: learning from one's own replies.

For objectives ppo, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline and gspo; all others
leave them alone. What each key means is told at length in `tasks/rl/settings.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tasks.config.defaults import COMPUTED


class KlIn(Enum):
    """Where the distance to the reference is taken off."""

    reward = auto()
    loss = auto()


class KlEstimator(Enum):
    """Estimates of KL from samples, see `tasks/rl/algorithms/kl.py`."""

    k1 = auto()
    k2 = auto()
    k3 = auto()


class CriticKind(Enum):
    """Where the critic lives."""

    shared = auto()
    separate = auto()


class Correction(Enum):
    """What becomes of differences between the rollout engine and the trainer."""

    none = auto()
    tis = auto()
    icepop = auto()
    sequence_mask = auto()


class RolloutEngine(Enum):
    """Who answers the prompts."""

    vllm = auto()
    transformers = auto()


class RewardEngine(Enum):
    """Where the reward model runs: in the training rank's own process, or in vLLM."""

    process = auto()
    vllm = auto()


@dataclass
class Rl:
    """The loop; counts are of an iteration, over all ranks. `train.global_batch_size` counts the
    replies of an optimizer step, `train.eval_steps`, `save_steps` and `log_every` iterations.
    """

    prompts: int = 32  # prompts an iteration
    samples: int = 4  # replies a prompt
    iterations: int | None = None  # null: train.epochs over the prompts
    passes: int = 1  # over the replies of an iteration
    eval_prompts: int = 128  # held-out prompts of an evaluation
    gamma: float = 1.0  # discount
    lam: float = 0.95  # ppo: of GAE
    clip_low: float = 0.2  # the ratio is clipped at 1 - this
    clip_high: float = 0.2  # the ratio is clipped at 1 + this
    dual_clip: float | None = None  # bound on ratio x advantage of bad replies; 3 is usual
    kl_coef: float = 0.0  # weight of the distance to the reference; 0: no reference
    kl_in: KlIn = KlIn.loss
    kl_estimator: KlEstimator = KlEstimator.k3
    kl_target: float | None = (
        None  # nats a token that kl_coef is steered to; null: kl_coef is fixed
    )
    kl_horizon: int = 10_000  # replies in which kl_coef moves by at most a fifth
    kl_limit: float | None = None  # nats a token past which training stops
    whiten: bool = False  # advantages of an iteration to mean 0, deviation 1
    entropy_coef: float = 0.0  # weight of the entropy bonus
    critic: CriticKind = CriticKind.shared  # ppo
    critic_lr: float | None = None  # null: train.lr
    critic_warmup: int = 0  # iterations in which only the critic learns
    value_clip: float | None = 0.2  # clip range of the critic's update; null: none
    refill: int = 0  # rounds in which groups without signal are asked anew
    overlong_buffer: int = 0  # tokens before the limit in which rewards fall
    overlong_penalty: float = 0.0  # at the limit
    correction: Correction = Correction.tis
    correction_high: float = 2.0  # upper bound of the importance ratio
    correction_low: float = 0.5  # icepop, sequence_mask
    mismatch_limit: float = 0.1  # nats a token between trainer and engine past which training stops
    mismatch_factor: float = 4.0  # times the first iterations' mismatch; 0: no such limit


@dataclass
class Rollout:
    """Who answers the prompts, and how."""

    engine: RolloutEngine = RolloutEngine.vllm
    max_new_tokens: int = COMPUTED  # 1024, or half of the model's context
    max_prompt_len: int = COMPUTED  # tokens; the same
    temperature: float = 1.0  # of sampling
    top_p: float = 1.0  # share of the probability that is sampled from
    top_k: int = 0  # 0: all
    tensor_parallel: int = 1  # ranks an engine
    kv_cache_gib: float = 1.0  # on CPU
    gpu_memory: float = 0.5  # share of a GPU that the engine may take
    max_num_seqs: int = 256  # sequences that vLLM decodes at once
    offload_trainer: bool = COMPUTED  # optimizer states in host memory during rollouts
    timeout_s: float | None = None  # of one iteration's rollouts; null: by the size of the weights


@dataclass
class Reward:
    """What replies are worth: the sum of all sources, each times its weight."""

    model: str | None = None  # folder of a reward model; in a chain: that of the link before
    model_weight: float = 1.0  # of the reward model's score in the sum
    normalize: bool = True  # by the model's own mean and deviation
    engine: RewardEngine = RewardEngine.process
    function: str | None = None  # path.py:name, or exact_match
    function_weight: float = 1.0  # of the function's reward in the sum
    url: str | None = None  # HTTP endpoint that scores responses
    url_weight: float = 1.0  # of the endpoint's reward in the sum
    timeout_s: float = 60.0  # of a call
    retries: int = 2  # of a failed call
    batch: int = 64  # replies a request
