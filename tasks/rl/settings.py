"""Settings of an online run beyond those of every training run: loop, rollouts, rewards.

The three sections travel inside of `Settings.online` as plain mappings, so that they are part of a
stage's key and of a checkpoint's identity. Knows no torch. Defaults are those of `tasks/config`; a
field without one has a default that depends on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config import online
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

    prompts: int = online.Rl.prompts
    samples: int = online.Rl.samples
    iterations: int | None = online.Rl.iterations
    passes: int = online.Rl.passes
    eval_prompts: int = online.Rl.eval_prompts
    gamma: float = online.Rl.gamma
    lam: float = online.Rl.lam
    clip_low: float = online.Rl.clip_low
    clip_high: float = online.Rl.clip_high
    dual_clip: float | None = online.Rl.dual_clip
    kl_coef: float = online.Rl.kl_coef
    kl_in: str = online.Rl.kl_in.name
    kl_estimator: str = online.Rl.kl_estimator.name
    kl_target: float | None = online.Rl.kl_target
    kl_horizon: int = online.Rl.kl_horizon
    kl_limit: float | None = online.Rl.kl_limit
    whiten: bool = online.Rl.whiten
    entropy_coef: float = online.Rl.entropy_coef
    critic: str = online.Rl.critic.name
    critic_lr: float | None = online.Rl.critic_lr
    critic_warmup: int = online.Rl.critic_warmup
    value_clip: float | None = online.Rl.value_clip
    refill: int = online.Rl.refill
    overlong_buffer: int = online.Rl.overlong_buffer
    overlong_penalty: float = online.Rl.overlong_penalty
    correction: str = online.Rl.correction.name
    correction_high: float = online.Rl.correction_high
    correction_low: float = online.Rl.correction_low
    mismatch_limit: float = online.Rl.mismatch_limit
    mismatch_factor: float = online.Rl.mismatch_factor


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
        offload_trainer: whether optimizer states, fp32 weights and gradients lie in host memory
            except during updates and checkpoints.
        timeout_s: of one iteration's rollouts; None: by the bytes of the weights.
    """

    max_new_tokens: int
    max_prompt_len: int
    offload_trainer: bool
    engine: str = online.Rollout.engine.name
    temperature: float = online.Rollout.temperature
    top_p: float = online.Rollout.top_p
    top_k: int = online.Rollout.top_k
    tensor_parallel: int = online.Rollout.tensor_parallel
    kv_cache_gib: float = online.Rollout.kv_cache_gib
    gpu_memory: float = online.Rollout.gpu_memory
    max_num_seqs: int = online.Rollout.max_num_seqs
    timeout_s: float | None = online.Rollout.timeout_s


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

    model: str | None = online.Reward.model
    model_weight: float = online.Reward.model_weight
    normalize: bool = online.Reward.normalize
    engine: str = online.Reward.engine.name
    function: str | None = online.Reward.function
    function_weight: float = online.Reward.function_weight
    url: str | None = online.Reward.url
    url_weight: float = online.Reward.url_weight
    timeout_s: float = online.Reward.timeout_s
    retries: int = online.Reward.retries
    batch: int = online.Reward.batch
    digest: str = ""


@dataclass(frozen=True)
class Online:
    """The three sections."""

    loop: Loop
    rollout: Rollout
    reward: Reward

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
