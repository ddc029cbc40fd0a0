"""The online training loop: sync weights, sample, score, measure, estimate advantages, update.

Every rank knows the whole iteration and computes the same advantages. Sampling, scoring, forward
and backward passes are split among the ranks. An iteration depends only on weights, optimizer
states, seed, iteration number and position in the prompts, so a run resumed from a checkpoint gives
the same result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tasks.core.errors import ConfigError, TrainingError
from tasks.core.events import emit
from tasks.rl.collect import Collector
from tasks.rl.experience import ExperienceScorer, pack_experience
from tasks.rl.metrics import Clock, collected, evaluated, samples_of, speeds
from tasks.rl.models import Setup
from tasks.rl.responses import PromptOrder, Response
from tasks.rl.rollout.engine import Engine
from tasks.rl.rollout.servers import ServerEngine
from tasks.rl.settings import Loop
from tasks.rl.update import Updater
from tasks.training.engine import saving
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import TrainerStates
from tasks.training.job import Batch
from tasks.training.selection import due, may_save, run_steps

CONTROLLER = "kl_controller"
CURSOR = "next_prompt"
LEARNED = "learned"


@dataclass
class OnlineTrainer:
    """One online training run and its progress."""

    setup: Setup  # models and settings of the run
    rollout_engine: Engine  # samples responses
    # optimizer states, which may be in host memory except during updates and checkpoints
    states: TrainerStates
    train: Collector  # samples and scores responses to training prompts
    heldout: Collector  # the same for evaluation prompts
    progress: Progress  # iterations and evaluations so far
    # responses of the last evaluation
    eval_responses: list[Response] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        loop, settings, count = self.setup.loop, self.setup.job.settings, len(self.train.prompts)
        kept = self.progress.kept
        self._kl_coef: float = kept.get(CONTROLLER, {"coef": loop.kl_coef})["coef"]
        self._ahead: ServerEngine | None = None
        proof = None
        if loop.staleness:
            assert isinstance(self.rollout_engine, ServerEngine), "the preflight has checked it"
            self._ahead, proof = self.rollout_engine, self.rollout_engine.proof
        self._scorer = ExperienceScorer(self.setup, proof)
        self._updater = Updater(self.setup, self._scorer)
        self._order = PromptOrder(count, loop.rollout_batch_size, loop.refill, settings.seed)
        self._cursor: int = kept.get(CURSOR, self.progress.step * loop.rollout_batch_size)
        self._last = iterations(loop, settings.batch, count)
        if loop.critic_warmup >= self._last:
            raise ConfigError(
                f"rl.critic_warmup={loop.critic_warmup}: the policy would learn in none of the "
                f"{self._last} iterations that train.epochs={settings.batch.epochs:g} takes",
                hint=f"rl.critic_warmup={self._last - 1}, or train.epochs=<more>",
            )

    def run(self) -> dict[str, float]:
        """Run the remaining iterations, with evaluations and checkpoints between them.

        Emits the events "plan", "step", "eval" and "samples". Returns the metrics of the evaluation
        of the weights that the engine has at the end. TrainingError if no step had a gradient.
        """
        progress, setup, order = self.progress, self.setup, self._order
        self.rollout_engine.sync_weights()
        after = run_steps(
            setup.job,
            progress,
            self._last,
            self._last * order.per_iteration / order.total,
            first=setup.ranks.first,
            step=self.iterate,
            evaluate=self.evaluate,
            save=self._save,
            load=self._load,
        )
        if not progress.kept.get(LEARNED, True):
            reason = "all responses to a prompt got equal rewards"
            if progress.step <= setup.loop.critic_warmup:
                reason = "only the critic has learned so far (rl.critic_warmup)"
            raise TrainingError(
                f"the policy had no gradient in any of {progress.step} iterations: {reason}",
                hint="look at the samples and their rewards: another reward, easier prompts, or "
                "rl.num_generations=<more>",
            )
        if not self.eval_responses:  # resumed with nothing left to do
            self.evaluate("after")
        return after

    def iterate(self, iteration: int) -> dict[str, float]:
        """Run one iteration and return its metrics."""
        begin, clock, setup = time.perf_counter(), Clock(), self.setup
        responses, self._cursor = self.train.collect(
            iteration, self._order, self._cursor, setup.loop.num_generations, clock
        )
        record = self._start_ahead(iteration, responses)
        self.rollout_engine.sleep()  # frees GPU memory for training; the next sync wakes it
        experience = pack_experience(responses)
        policy_only = setup.critic is None and not setup.has_reference
        if not (policy_only and self._updater.measures(len(responses))):
            with clock.phase("measure"):
                experience = self._scorer.measure(experience)
        with clock.phase("estimate"):
            experience, estimated = self._scorer.estimate(experience, self._kl_coef, iteration)
        record |= estimated
        self._kl_coef = adapted(self._kl_coef, record, len(responses), setup.loop)
        with clock.phase("update"), self.states.on_device():
            record |= self._updater.update(iteration, experience, of=self._last)
        if self._ahead is not None:
            with clock.phase("wait"):
                self._ahead.finish_ahead()
        with clock.phase("sync_weights"):
            self.rollout_engine.sync_weights()
        record |= collected(responses) | speeds(clock, experience, begin)
        if record.get("staleness"):  # they were sampled during the last iteration
            del record["tokens_per_s/generate"]
        if setup.ranks.first and due(setup.job.settings.log_every, iteration):
            emit("samples", step=iteration, rows=samples_of(responses))
        kept = self.progress.kept
        learned = kept.get(LEARNED, False) or record.get("grad_norm", 0.0) > 0
        coef = {"coef": self._kl_coef}
        kept |= {CONTROLLER: coef, CURSOR: self._cursor, LEARNED: learned}
        return {"step": iteration, **record, "epoch": self._cursor / self._order.total}

    def _start_ahead(self, iteration: int, responses: Sequence[Response]) -> dict[str, float]:
        """Begin to sample the next iteration's responses; return how old this iteration's are.

        Nothing is sampled ahead over a checkpoint, so that a resumed run samples the same.
        """
        if self._ahead is None:
            return {}
        loop = self.setup.loop
        if iteration < self._last and not may_save(self.setup.job.settings, iteration):
            numbers = self._order.numbers(self._cursor, loop.rollout_batch_size)
            self._ahead.start_ahead(
                self.train.requests(numbers, iteration + 1, loop.num_generations)
            )
        versions = [response.generated.version for response in responses]
        return {"staleness": self._ahead.version - sum(versions) / len(versions)}

    def evaluate(self, when: str) -> dict[str, float]:
        """Return metrics of greedy responses to the evaluation prompts; emits the event "eval"."""
        clock = Clock()
        numbers = list(range(len(self.heldout.prompts)))
        self.eval_responses = self.heldout.sample(numbers, 0, 1, clock, greedy=True)
        metrics = evaluated(self.eval_responses)
        if self.setup.ranks.first:
            about = {"when": when, "step": self.progress.step}
            emit("eval", **about, eval_s=sum(clock.seconds.values()), **metrics)
        return metrics

    def _save(self, last: bool) -> None:
        of, progress = self.setup, self.progress
        with self._states_on_device():
            saving.save(of.engine, of.job, of.ranks, progress, of.others, last=last)
        if self.states.away and not last:
            self.rollout_engine.sync_weights()

    def _load(self, folder: Path) -> None:
        with self._states_on_device():
            saving.load(self.setup.engine, folder, self.setup.others)
        self.rollout_engine.sync_weights()

    @contextmanager
    def _states_on_device(self) -> Iterator[None]:
        """Bring the optimizer states back to the device, in the place of the sleeping engine."""
        if self.states.away:
            self.rollout_engine.sleep()
        with self.states.on_device():
            yield


def iterations(loop: Loop, batch: Batch, prompts: int) -> int:
    """Return `rl.iterations`, or the number of iterations that `train.epochs` takes."""
    if loop.iterations is not None:
        return loop.iterations
    return max(1, math.ceil(batch.epochs * prompts / loop.rollout_batch_size))


def adapted(coef: float, record: Mapping[str, float], responses: int, loop: Loop) -> float:
    """Return the KL coefficient after an iteration with these metrics.

    Without `rl.kl_target` it is constant. Else the proportional controller of arXiv:1909.08593,
    2.2, eq. 4: the relative error e = kl / target - 1, clipped to +-0.2, multiplies it by
    (1 + e)^(responses / horizon), of which the paper's factor is the first-order approximation.
    """
    if loop.kl_target is None or coef == 0:
        return coef
    error = min(max(record["kl_k1"] / loop.kl_target - 1, -0.2), 0.2)
    return float(coef * (1 + error) ** (responses / loop.kl_horizon))
