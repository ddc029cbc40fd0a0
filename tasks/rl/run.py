"""One rank of an online run: build the models, run the loop, write the artifact."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from tasks.core.events import emit
from tasks.rl.collect import Collector
from tasks.rl.critic import describe_critic, write_critic
from tasks.rl.environment import EnvironmentProcess, Episodes
from tasks.rl.loop import OnlineTrainer
from tasks.rl.observations import ObservationTokens
from tasks.rl.prompts import load_prompts
from tasks.rl.responses import Prompt
from tasks.rl.rewards import Rewards, open_rewards
from tasks.rl.settings import Loop, Online
from tasks.rl.setup import Setup, open_engine, set_up
from tasks.rl.user_code import ENVIRONMENT, FunctionReference
from tasks.serving.prompts import stop_ids
from tasks.training.engine.deepspeed_engine import Ranks, require_same_versions
from tasks.training.engine.offload import TrainerStates
from tasks.training.job import TrainJob
from tasks.training.model.build import load_tokenizer
from tasks.training.model.packed_model import model_of, restore_attention
from tasks.training.model.probe import choose_probes, fingerprint_of
from tasks.training.outputs import write_model, write_results, write_shards
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.packing import trial_row

LOG = logging.getLogger("plumbline.rl")
ENVIRONMENT_LOG = "environment.log"


def train_with(ranks: Ranks, job: TrainJob, started: float) -> None:
    """Train, and write this rank's part of the `shards` artifact."""
    online = Online.of(job.settings.online)
    if job.settings.launch.nodes > 1:
        require_same_versions(ranks)
    tokenizer = load_tokenizer(job)
    train, heldout = _prompts(job, online, tokenizer, ranks)
    trial = trial_row(Examples.of_texts([heldout[0].ids, heldout[-1].ids]))
    ends = stop_ids(job.side_files, tokenizer.eos_token_id)
    with ExitStack() as stack:
        played = _environment(job, online.loop, ObservationTokens(tokenizer, ends), train[0], stack)
        setup, progress = set_up(ranks, job, online, tokenizer=tokenizer, trial=trial)
        if setup.critic is not None:
            describe_critic(setup.critic, job, setup.loop, ranks)
        if ranks.first:
            write_model(job, model=setup.engine.module, tokenizer=tokenizer)
        engines = [setup.engine] if setup.critic is None else [setup.engine, setup.critic.engine]
        states = TrainerStates(engines, online.rollout.offload_trainer)
        states.offload()  # the rollout engine sizes its memory by what is free when it starts
        rewards = stack.enter_context(_rewards(setup, tokenizer))
        rollout_engine = stack.enter_context(
            open_engine(
                job,
                online.rollout,
                ranks,
                engine=setup.engine,
                ends=ends,
                probes=[prompt.ids.tolist() for prompt in heldout[:16]],
            )
        )
        loop, budget = online.loop, online.rollout.max_new_tokens
        episodes = None
        if played is not None:
            episodes = Episodes(rollout_engine, *played, ranks, loop.max_turns, budget)
        overlong = {
            "limit": budget, "buffer": loop.overlong_buffer, "most": loop.overlong_penalty,
        }  # fmt: skip
        train_collector, eval_collector = (
            Collector(
                rollout_engine, rewards, prompts, tokenizer, ranks, job.settings.seed, episodes,
                overlong,
            )
            for prompts in (train, heldout)
        )  # fmt: skip
        trainer = OnlineTrainer(
            setup, rollout_engine, states, train_collector, eval_collector, progress
        )
        if ranks.first:
            emit("ready", startup_s=time.time() - started, device=str(ranks.device))
        after = trainer.run()
    _leave(trainer, after)


def _rewards(setup: Setup, tokenizer: Any) -> Rewards:
    """Open the reward sources."""
    job, reward = setup.job, setup.online.reward
    if job.reward is not None:
        reward = replace(reward, model=str(job.reward))
    return open_rewards(
        reward,
        tokenizer=tokenizer,
        device=setup.ranks.device,
        log=LOG,
        logs=job.checkpoints,
        required=setup.loop.environment is None,
    )


def _environment(
    job: TrainJob, loop: Loop, observations: ObservationTokens, prompt: Prompt, stack: ExitStack
) -> tuple[EnvironmentProcess, ObservationTokens] | None:
    """Load the environment and check the chat template, before the models; None without one."""
    if loop.environment is None:
        return None
    observations = replace(observations, role=loop.observation_role)
    observations.require_stable(prompt)
    environment = EnvironmentProcess(
        FunctionReference.of(loop.environment, ENVIRONMENT),
        timeout_s=loop.environment_timeout_s,
        log=LOG,
        log_path=job.checkpoints / ENVIRONMENT_LOG,
    )
    stack.callback(environment.close)
    return environment, observations


def _prompts(
    job: TrainJob, online: Online, tokenizer: Any, ranks: Ranks
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    limit = online.rollout.max_prompt_len
    train, heldout = (
        load_prompts(job.data / f"{split}.jsonl", tokenizer=tokenizer, limit=limit, ranks=ranks)
        for split in ("train", "heldout")
    )
    return train, heldout[: online.loop.eval_prompts]


def _leave(trainer: OnlineTrainer, after: dict[str, float]) -> None:
    """Write what was trained: shards of policy and critic, metrics and fingerprint."""
    setup = trainer.setup
    job, ranks, engine = setup.job, setup.ranks, setup.engine
    write_shards(engine.module, job.out, ranks)
    if setup.critic is not None:
        write_critic(setup.critic, job, ranks)
    restore_attention(model_of(engine.module), job.settings.attn_implementation)
    responses = [scored.response for scored in trainer.eval_responses]
    examples = Examples.of_texts([response.ids for response in responses])
    probes = choose_probes(examples, job.settings.probes)
    fingerprint = fingerprint_of(engine, probes, ranks.device)
    peak = float(ranks.peak_memory(**getattr(trainer.rollout_engine, "reserved", {})))
    if ranks.first:
        metrics = {**_metrics(trainer, after), "peak_memory": peak}
        write_results(
            job,
            metrics=metrics,
            progress=trainer.progress,
            measured=fingerprint,
        )
        emit("done", **metrics)
    engine.destroy()


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
