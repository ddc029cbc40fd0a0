"""One rank of an online run: build the models, run the loop, write the artifact."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace

from tasks.core.events import emit
from tasks.rl.collect import Collector
from tasks.rl.environment import EnvironmentProcess, Episodes, ObservationTokens
from tasks.rl.loop import OnlineTrainer
from tasks.rl.models import set_up
from tasks.rl.responses import load_prompts
from tasks.rl.rewards import open_rewards
from tasks.rl.rollout.engine import VllmEngine
from tasks.rl.rollout.policy import Policy
from tasks.rl.rollout.servers import ServerEngine
from tasks.rl.settings import Online
from tasks.rl.user_code import ENVIRONMENT, FunctionReference
from tasks.serving.prompts import stop_ids
from tasks.training.engine.deepspeed_engine import Ranks, TrainerStates
from tasks.training.job import TrainJob
from tasks.training.model.build import load_tokenizer
from tasks.training.model.packed_model import model_of, restore_attention
from tasks.training.model.probe import choose_probes, fingerprint_of
from tasks.training.outputs import finish, write_model, write_shards
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import trial_row

LOG = logging.getLogger("plumbline.rl")
ENVIRONMENT_LOG = "environment.log"


def train_with(ranks: Ranks, job: TrainJob, started: float) -> None:
    """Train, and write this rank's part of the `shards` artifact."""
    online = Online.of(job.settings.online)
    loop, budget = online.loop, online.rollout.max_new_tokens
    tokenizer = load_tokenizer(job)
    train, heldout = (
        load_prompts(
            job.data / f"{split}.jsonl",
            tokenizer=tokenizer,
            limit=online.rollout.max_prompt_len,
            ranks=ranks,
        )
        for split in ("train", "heldout")
    )
    heldout = heldout[: loop.eval_prompts]
    trial = trial_row(Examples.of_texts([heldout[0].ids, heldout[-1].ids]))
    ends = stop_ids(job.side_files, tokenizer.eos_token_id)
    observations = ObservationTokens(tokenizer, ends, loop.observation_role)
    with ExitStack() as stack:
        environment = None
        if loop.environment is not None:  # before the models: it may not load
            observations.require_stable(train[0])
            environment = EnvironmentProcess(
                FunctionReference.of(loop.environment, ENVIRONMENT),
                timeout_s=loop.environment_timeout_s,
                log=LOG,
                log_path=job.checkpoints / ENVIRONMENT_LOG,
            )
            stack.callback(environment.close)
        setup, progress = set_up(ranks, job, online, tokenizer=tokenizer, trial=trial)
        engines = [setup.engine]
        if setup.critic is not None:
            engines.append(setup.critic.engine)
        if ranks.first:
            write_model(job, model=setup.engine.module, tokenizer=tokenizer)
        states = TrainerStates(engines, online.rollout.offload_trainer)
        states.offload()  # the rollout engine sizes its memory by what is free when it starts
        model = online.reward.model if job.reward is None else str(job.reward)
        rewards = stack.enter_context(
            open_rewards(
                replace(online.reward, model=model),
                tokenizer=tokenizer,
                device=ranks.device,
                log=LOG,
                logs=job.checkpoints,
            )
        )
        kind = ServerEngine if online.rollout.engine == "server" else VllmEngine
        rollout_engine = kind(
            Policy(setup.engine, job, ranks),
            online.rollout,
            ends=tuple(ends),
            probes=[prompt.ids.tolist() for prompt in heldout[:16]],
        )
        stack.callback(rollout_engine.close)
        episodes = None
        if environment is not None:
            episodes = Episodes(
                rollout_engine, environment, observations, ranks, loop.max_turns, budget
            )
        train_collector, eval_collector = (
            Collector(
                rollout_engine, rewards, prompts, tokenizer, ranks, job.settings.seed, episodes
            )
            for prompts in (train, heldout)
        )
        trainer = OnlineTrainer(
            setup, rollout_engine, states, train_collector, eval_collector, progress
        )
        if ranks.first:
            emit("ready", startup_s=time.time() - started, device=str(ranks.device))
        after = trainer.run()
    _write(trainer, after)


def _write(trainer: OnlineTrainer, after: dict[str, float]) -> None:
    """Write what was trained: shards of the policy, metrics and fingerprint."""
    setup, progress = trainer.setup, trainer.progress
    job, ranks, engine = setup.job, setup.ranks, setup.engine
    write_shards(engine.module, job.out, ranks)
    restore_attention(model_of(engine.module), job.settings.attn_implementation)
    examples = Examples.of_texts([response.ids for response in trainer.eval_responses])
    fingerprint = fingerprint_of(engine, choose_probes(examples, job.settings.probes), ranks.device)
    assert progress.before is not None
    metrics = {
        "heldout_reward_before": progress.before["reward"],
        "heldout_reward_after": after["reward"],
        "mismatch": progress.last["mismatch/mean_abs"],
    }
    metrics |= {name: progress.last[name] for name in ("kl", "overhead") if name in progress.last}
    reserved = getattr(trainer.rollout_engine, "reserved", {})
    finish(engine, job, ranks, progress, metrics, fingerprint, reserved=reserved)
