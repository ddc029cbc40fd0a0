"""What an online run is told beyond what every training run is: loop, rollouts, rewards.

The three sections travel inside of `Settings.online` as plain mappings, so that they are part of a
stage's key and of a checkpoint's identity. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.training.job import read_section


@dataclass(frozen=True)
class Loop:
    """Section `rl`: one iteration rolls out, scores, estimates advantages and updates.

    Counts are of the whole iteration, over all ranks. What an algorithm does not use is refused by
    `algorithms.recipe`.

    Attributes:
        prompts: prompts of an iteration.
        samples: replies to each of them, a group.
        iterations: how many; None: `train.epochs` over the prompts.
        passes: over the replies of one iteration (PPO's epochs).
        eval_prompts: held-out prompts that an evaluation asks at most.
        gamma: discount of later rewards, by token.
        lam: of GAE (arXiv:1506.02438).
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: and at 1 + clip_high (DAPO's asymmetric clip, arXiv:2503.14476).
        dual_clip: bound on ratio x advantage for bad replies (arXiv:1912.09729); None: none.
        kl_coef: weight of the distance to the reference; 0: no reference is asked.
        kl_in: `reward` (taken off every token's reward) or `loss`.
        kl_estimator: k1, k2 or k3 (Schulman 2020, "Approximating KL divergence").
        kl_target: nats a token that an adaptive coefficient steers to; None: fixed.
        kl_horizon: replies in which the adaptive coefficient moves by at most a fifth, see `kl.py`.
        kl_limit: nats a token from the reference past which training stops; None: never.
        whiten: advantages of the whole iteration to mean 0 and deviation 1.
        entropy_coef: weight of the entropy in the loss.
        critic: `shared` (own adapter and head on the policy's trunk) or `separate` (own model).
        critic_lr: peak; None: that of the policy.
        critic_warmup: iterations in which only the critic learns.
        value_clip: values move at most so far from the old ones; None: freely.
        refill: rounds in which groups without signal are sampled anew, with other prompts
            (dynamic sampling, arXiv:2503.14476); 0: none.
        overlong_buffer: tokens before the limit in which a reply's reward begins to fall.
        overlong_penalty: what it has fallen by at the limit.
        correction: of the engine's log-probabilities towards the trainer's: none, tis, icepop or
            sequence_mask.
        correction_high: largest ratio trainer to engine that counts in full.
        correction_low: smallest; icepop and sequence_mask.
        mismatch_limit: trainer-engine log-prob difference (mean absolute, nats per token) past
            which training stops.
        mismatch_factor: the same, in multiples of the median of the first five iterations, once it
            is above a tenth of `mismatch_limit`; 0: no such limit.
    """

    prompts: int = 32
    samples: int = 4
    iterations: int | None = None
    passes: int = 1
    eval_prompts: int = 128
    gamma: float = 1.0
    lam: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_in: str = "loss"
    kl_estimator: str = "k3"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    kl_limit: float | None = None
    whiten: bool = False
    entropy_coef: float = 0.0
    critic: str = "shared"
    critic_lr: float | None = None
    critic_warmup: int = 0
    value_clip: float | None = 0.2
    refill: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 0.0
    correction: str = "tis"
    correction_high: float = 2.0
    correction_low: float = 0.5
    mismatch_limit: float = 0.1
    mismatch_factor: float = 4.0


@dataclass(frozen=True)
class Rollout:
    """Section `rollout`: who answers the prompts, and how.

    Attributes:
        engine: `vllm` or `transformers`.
        max_new_tokens: longest reply.
        max_prompt_len: longest prompt, in tokens; longer ones are refused before training.
        temperature: of sampling; log-probabilities everywhere are taken at it.
        top_p: nucleus; 1: everything.
        top_k: most likely tokens sampled among; 0: all.
        tensor_parallel: ranks that share one engine.
        kv_cache_gib: GiB of an engine's KV cache on CPU.
        gpu_memory: share of a GPU's memory that the engine may take.
        max_num_seqs: replies that an engine works on at once.
        timeout_s: of one iteration's rollouts.
    """

    engine: str = "vllm"
    max_new_tokens: int = 64
    max_prompt_len: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    tensor_parallel: int = 1
    kv_cache_gib: float = 1.0
    gpu_memory: float = 0.5
    max_num_seqs: int = 256
    timeout_s: float = 900.0


@dataclass(frozen=True)
class Reward:
    """Section `reward`: what replies are worth. Sources are added up, each times its weight.

    Attributes:
        model: folder of a reward model; None: none.
        model_weight: of its scores.
        normalize: scores less the model's own mean, over its own deviation.
        engine: `process` or `vllm`: where the reward model runs.
        function: `path.py:name`, or `exact_match`; None: none.
        function_weight: of what it returns.
        url: HTTP endpoint; None: none.
        url_weight: of what it answers.
        timeout_s: of one call of function or endpoint.
        retries: of a failed request.
        batch: replies a request.
        digest: of the function's file and the model's folder, so that a result is not taken for one
            of other rewards.
    """

    model: str | None = None
    model_weight: float = 1.0
    normalize: bool = True
    engine: str = "process"
    function: str | None = None
    function_weight: float = 1.0
    url: str | None = None
    url_weight: float = 1.0
    timeout_s: float = 60.0
    retries: int = 2
    batch: int = 64
    digest: str = ""


@dataclass(frozen=True)
class Online:
    """The three sections."""

    loop: Loop = field(default_factory=Loop)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)

    @classmethod
    def of(cls, sections: Mapping[str, Any]) -> Online:
        """From `Settings.online`: sections `rl`, `rollout` and `reward`.

        Raises:
            ConfigError: a key that a section does not have.
        """
        return cls(
            loop=read_section(Loop, sections.get("rl", {}), "rl"),
            rollout=read_section(Rollout, sections.get("rollout", {}), "rollout"),
            reward=read_section(Reward, sections.get("reward", {}), "reward"),
        )
