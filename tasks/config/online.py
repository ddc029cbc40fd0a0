"""Sections `rl`, `rollout` and `reward`, for objectives that learn from their own responses:
the names of `defaults.ALGORITHMS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.config.choices import (
    Correction,
    Count,
    CriticKind,
    Engine,
    KlEstimator,
    KlIn,
    Natural,
    NonNegative,
    ObservationRole,
    Positive,
    PositiveShare,
    Rate,
    Share,
    Staleness,
)
from tasks.config.defaults import COMPUTED
from tasks.config.section import Section


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
    observation_role: ObservationRole = "user"  # role of the environment's messages
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
    critic: CriticKind = "shared"  # ppo; shared: an adapter on the policy's trunk
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
