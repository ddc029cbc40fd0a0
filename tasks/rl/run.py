"""One rank of an online run: build the models, run the loop, write the artifact."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tasks.core.events import emit
from tasks.rl.algorithms.correction import MismatchLimits
from tasks.rl.algorithms.registry import Recipe, recipe
from tasks.rl.experience.collect import Collector
from tasks.rl.experience.critic import CRITIC, Critic, start_critic
from tasks.rl.experience.critic_files import write_critic
from tasks.rl.experience.experience_scoring import ExperienceScorer
from tasks.rl.experience.prompts import PromptOrder, load_prompts
from tasks.rl.experience.reference import Reference, open_reference
from tasks.rl.experience.responses import Prompt, ScoredResponse
from tasks.rl.loop import OnlineTrainer
from tasks.rl.rewards import Rewards, open_rewards
from tasks.rl.rollout.engines import Engine, open_engine
from tasks.rl.settings import Loop, Online
from tasks.rl.update import Updater
from tasks.serving.bf16_linear import use_fp32_where_faster
from tasks.training.engine.check_same_versions import require_alike
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.offload import TrainerStates
from tasks.training.engine.saving import Others, restore
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Batch, TrainJob
from tasks.training.model.build import load_model, load_tokenizer
from tasks.training.model.packed_model import give_back_attention, model_of, require_same
from tasks.training.model.probe import PROBE_TOKENS, fingerprint_of
from tasks.training.outputs import write_common
from tasks.training.run import write_own
from tasks.training.tokens.data import end_ids
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.packing import Row, trial_row

LOG = logging.getLogger("plumbline.rl")


def train_with(ranks: Ranks, job: TrainJob, started: float) -> None:
    """Train, and write this rank's part of the `shards` artifact.

    Args:
        ranks: this process and its peers.
        job: the training job.
        started: `time.time()` when the process began, for the event "ready".
    """
    if not ranks.gpu:
        use_fp32_where_faster()
    online = Online.of(job.settings.online)
    if job.settings.launch.nodes > 1:
        require_alike(ranks)
    tokenizer = load_tokenizer(job)
    train, heldout = _prompts(job, online, tokenizer, ranks)
    rank = _Rank(ranks, job, online, recipe(job.settings.objective, online.loop), tokenizer)
    models = rank.start(heldout)
    models.states.offload()  # the engine sizes its memory by what is free when it starts
    with ExitStack() as stack:
        rewards = stack.enter_context(rank.rewards())
        ends = end_ids(job.side_files, tokenizer)
        rollout_engine = stack.enter_context(
            open_engine(job, online.rollout, ranks, engine=models.engine, ends=sorted(ends))
        )
        trainer = rank.trainer(models, rollout_engine, rewards, train, heldout)
        if ranks.first:
            emit("ready", startup_s=time.time() - started, device=str(ranks.device))
        after = trainer.run()
    _leave(trainer, tokenizer, after)


@dataclass(frozen=True)
class _Models:
    """The models of a run and their training state."""

    engine: Any
    critic: Critic | None
    reference: Reference | None
    updater: Updater
    progress: Any
    states: TrainerStates


@dataclass(frozen=True)
class _Rank:
    """Builds models, rewards and the trainer of one rank."""

    ranks: Ranks
    job: TrainJob
    online: Online
    algorithm: Recipe
    tokenizer: Any

    def start(self, heldout: tuple[Prompt, ...]) -> _Models:
        """Build policy, critic and reference, and load the last checkpoint if there is one."""
        job, ranks, loop = self.job, self.ranks, self.online.loop
        config = deepspeed_config(job.settings, ranks.world_size, gpu=ranks.gpu)
        model = load_model(job, ranks, config, tokenizer=self.tokenizer)
        engine = start_engine(model, config, job.settings.optim)
        critic = reference = None
        if self.algorithm.critic:
            critic = start_critic(
                job, loop, ranks, policy=engine.module, config=config, tokenizer=self.tokenizer
            )
        others: Others = {} if critic is None else {CRITIC: critic.active}
        progress = restore(engine, job, ranks, others)
        require_same(engine, _trial_row(heldout).to(ranks.device))
        if loop.kl_coef > 0 or loop.kl_limit is not None:
            reference = open_reference(
                job, ranks, engine=engine, config=config, tokenizer=self.tokenizer
            )
        updater = Updater(engine, critic, ranks, job, loop, self.online.rollout, self.algorithm)
        trained = [engine] if critic is None else [engine, critic.engine]
        states = TrainerStates(trained, self.online.rollout.offload_trainer)
        return _Models(engine, critic, reference, updater, progress, states)

    def rewards(self) -> Rewards:
        """Open the reward sources."""
        reward = self.online.reward
        if self.job.reward is not None:
            reward = replace(reward, model=str(self.job.reward))
        return open_rewards(
            reward,
            tokenizer=self.tokenizer,
            device=self.ranks.device,
            log=LOG,
            logs=self.job.checkpoints,
            longest=self.online.rollout.max_prompt_len + self.online.rollout.max_new_tokens,
        )

    def trainer(
        self,
        models: _Models,
        rollout_engine: Engine,
        rewards: Rewards,
        train: tuple[Prompt, ...],
        heldout: tuple[Prompt, ...],
    ) -> OnlineTrainer:
        """Return the training loop over these models and prompts."""
        seed, loop = self.job.settings.seed, self.online.loop
        prompt_order = PromptOrder(len(train), loop.rollout_batch_size, loop.refill, seed)
        train_collector, eval_collector = (
            Collector(rollout_engine, rewards, prompts, self.tokenizer, self.ranks, seed)
            for prompts in (train, heldout)
        )
        return OnlineTrainer(
            engine=models.engine,
            critic=models.critic,
            experience_scorer=ExperienceScorer(
                models.engine,
                models.critic,
                models.reference,
                self.ranks,
                self.job,
                self.online,
                self.algorithm,
                MismatchLimits(loop.mismatch_limit, loop.mismatch_factor),
            ),
            ranks=self.ranks,
            job=self.job,
            online=self.online,
            rollout_engine=rollout_engine,
            states=models.states,
            train=train_collector,
            heldout=eval_collector,
            updater=models.updater,
            prompt_order=prompt_order,
            iterations=iterations(loop, self.job.settings.batch, len(train)),
            progress=models.progress,
        )


def iterations(loop: Loop, batch: Batch, prompts: int) -> int:
    """Return `rl.iterations`, or the number of iterations that `train.epochs` takes.

    Args:
        loop: section `rl`.
        batch: batch settings, with the number of epochs.
        prompts: number of training prompts.
    """
    if loop.iterations is not None:
        return loop.iterations
    return max(1, math.ceil(batch.epochs * prompts / (loop.rollout_batch_size * (1 + loop.refill))))


def _prompts(
    job: TrainJob, online: Online, tokenizer: Any, ranks: Ranks
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    limit = online.rollout.max_prompt_len
    train, heldout = (
        load_prompts(job.data / f"{split}.jsonl", tokenizer=tokenizer, limit=limit, ranks=ranks)
        for split in ("train", "heldout")
    )
    return train, heldout[: online.loop.eval_prompts]


def _leave(trainer: OnlineTrainer, tokenizer: Any, after: dict[str, float]) -> None:
    """Write the artifact: shards of policy and critic, tokenizer, metrics and fingerprint."""
    job, ranks, engine = trainer.job, trainer.ranks, trainer.engine
    write_own(engine.module, job, ranks)
    if trainer.critic is not None:
        write_critic(trainer.critic, job, trainer.online.loop, ranks)
    give_back_attention(model_of(engine.module), job.settings.attn_implementation)
    probes = _eval_probes(trainer.eval_responses, job.settings.probes)
    fingerprint = fingerprint_of(engine, probes, ranks.device)
    if ranks.first:
        metrics = _metrics(trainer, after)
        write_common(
            job,
            model=engine.module,
            tokenizer=tokenizer,
            metrics=metrics,
            progress=trainer.progress,
            measured=fingerprint,
        )
        emit("done", **metrics)
    engine.destroy()


def _eval_probes(responses: Sequence[ScoredResponse], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the first `count` evaluation prompts and responses, cut to `PROBE_TOKENS`."""
    sequences = [
        np.concatenate([scored.response.prompt.ids, scored.response.generated.ids])
        for scored in responses[:count]
    ]
    return tuple(tuple(ids[:PROBE_TOKENS].tolist()) for ids in sequences)


def _trial_row(prompts: Sequence[Prompt]) -> Row:
    """Return a packed row of two short prompts, for `packed_model.require_same`."""
    pieces = [prompts[0].ids, prompts[-1].ids]
    ids = np.concatenate(pieces)
    bounds = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return trial_row(
        Examples(("text",), ("first", "last"), ids, np.ones(len(ids), np.uint8), bounds, {})
    )


def _metrics(trainer: OnlineTrainer, after: dict[str, float]) -> dict[str, float]:
    progress = trainer.progress
    assert progress.before is not None
    metrics = {
        "steps": float(progress.step),
        "loss": progress.losses[-1],
        "heldout_reward_before": progress.before["reward"],
        "heldout_reward_after": after["reward"],
        "mismatch": progress.last["mismatch/mean_abs"],
        "train_s": progress.seconds,
    }
    for name in ("kl", "overhead"):
        if name in progress.last:
            metrics[name] = progress.last[name]
    if progress.best is not None:
        metrics["best_step"] = float(progress.best.step)
    return metrics
