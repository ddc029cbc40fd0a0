"""The online training loop: sync weights, sample, score, measure, estimate advantages, update.

Every rank knows the whole iteration and computes the same advantages. Sampling, scoring, forward
and backward passes are split among the ranks. An iteration depends only on weights, optimizer
states, seed and iteration number, so a run resumed from a checkpoint gives the same result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tasks.core.errors import PlumblineError
from tasks.core.events import emit
from tasks.rl.algorithms import kl
from tasks.rl.experience.collect import Clock, Collector
from tasks.rl.experience.critic import CRITIC, Critic
from tasks.rl.experience.experience_scoring import ExperienceScorer
from tasks.rl.experience.packed_rows import pack_experience
from tasks.rl.experience.prompts import PromptOrder
from tasks.rl.experience.records import collected, evaluated, samples_of, speeds
from tasks.rl.experience.responses import ScoredResponse
from tasks.rl.rollout.engines import Engine
from tasks.rl.settings import Online
from tasks.rl.update import Updater
from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.offload import TrainerStates
from tasks.training.job import TrainJob
from tasks.training.selection import direction, has_stopped, judge

CONTROLLER = "kl_controller"
MISMATCH = "first_mismatches"


@contextmanager
def _iteration_in_errors(iteration: int) -> Iterator[None]:
    """Prefix the message of every error of ours with the iteration."""
    try:
        yield
    except PlumblineError as error:
        if not error.message.startswith("iteration "):
            error.message = f"iteration {iteration}: {error.message}"
            error.args = (error.message,)
        raise


@dataclass
class OnlineTrainer:
    """One online training run and its progress.

    Attributes:
        engine: the DeepSpeed engine of the policy.
        critic: None if the algorithm has no critic.
        ranks: this process and its peers.
        job: the training job.
        online: sections `rl`, `rollout` and `reward`.
        experience_scorer: measures responses and estimates advantages.
        rollout_engine: samples responses.
        states: optimizer states, which may be in host memory except during updates and checkpoints.
        train: samples and scores responses to training prompts.
        heldout: the same for evaluation prompts.
        updater: takes the optimizer steps.
        prompt_order: chooses the prompts of each iteration.
        iterations: number of iterations of the whole run.
        progress: iterations and evaluations so far.
        controller: coefficient of the KL to the reference.
        eval_responses: responses of the last evaluation.
    """

    engine: Any
    critic: Critic | None
    ranks: Ranks
    job: TrainJob
    online: Online
    experience_scorer: ExperienceScorer
    rollout_engine: Engine
    states: TrainerStates
    train: Collector
    heldout: Collector
    updater: Updater
    prompt_order: PromptOrder
    iterations: int
    progress: Progress
    controller: kl.Controller = field(init=False)
    eval_responses: list[ScoredResponse] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        kept = self.progress.kept.get(CONTROLLER)
        self.controller = kl.controller(self.online.loop, kept)
        self.experience_scorer.mismatch_limits.first = list(self.progress.kept.get(MISMATCH, []))

    def run(self) -> dict[str, float]:
        """Run the remaining iterations, with evaluations and checkpoints between them.

        Emits the events "plan", "step", "eval" and "samples".

        Returns:
            Metrics of the evaluation of the weights that the engine has at the end.

        Raises:
            TrainingError: a value is not finite, the policy is too far from the reference, or the
                rollout engine does not sample from the policy being trained.
        """
        progress, last = self.progress, self.iterations
        if self.ranks.first:
            epochs = self.prompt_order.epoch_at(last)
            emit("plan", steps=last, epochs=epochs, taken=progress.step)
        self.rollout_engine.sync_weights()
        if progress.before is None:
            progress.before = self.evaluate("before")
        while progress.step < last and not has_stopped(progress, self.job.settings.evaluate):
            with _iteration_in_errors(progress.step + 1):
                record = self.iterate(progress.step + 1)
            self._note(record, last=last)
            self._evaluate_and_save(last=last)
        return self._leave()

    def iterate(self, iteration: int) -> dict[str, float]:
        """Run one iteration and return its metrics."""
        begin, clock = time.perf_counter(), Clock()
        samples = self.online.loop.num_generations
        numbered = self.train.collect(iteration, self.prompt_order, samples, clock)
        self.rollout_engine.sleep()  # frees GPU memory for training; the next sync wakes it
        scored = [response for _, response in numbered]
        batch = pack_experience(scored)
        if not (self.experience_scorer.needs_policy_only and self.updater.measures(len(scored))):
            with clock.phase("measure"):
                batch = self.experience_scorer.measure(batch)
        with clock.phase("estimate"):
            inputs, record = self.experience_scorer.estimate(batch, self.controller.coef, iteration)
        if "kl" in record:
            self.controller = self.controller.after(record["kl"], len(scored))
        with clock.phase("update"), self.states.on_device():
            compare = partial(self.experience_scorer.compare, iteration=iteration)
            record |= self.updater.update(iteration, inputs, compare, of=self.iterations)
        with clock.phase("sync_weights"):
            self.rollout_engine.sync_weights()
        record |= collected(scored) | speeds(clock, batch, begin)
        if self.ranks.first and self._due(self.job.settings.log_every, iteration):
            emit("samples", step=iteration, rows=samples_of(scored))
        return {"step": iteration, **record, "epoch": self.prompt_order.epoch_at(iteration)}

    def evaluate(self, when: str) -> dict[str, float]:
        """Return metrics of greedy responses to the evaluation prompts; emits the event "eval"."""
        clock = Clock()
        numbers = list(range(len(self.heldout.prompts)))
        numbered = self.heldout.sample(numbers, 0, 1, clock, greedy=True)
        self.eval_responses = [response for _, response in numbered]
        metrics = evaluated(self.eval_responses)
        if self.ranks.first:
            about = {"when": when, "step": self.progress.step}
            emit("eval", **about, eval_s=sum(clock.seconds.values()), **metrics)
        return metrics

    def _note(self, record: dict[str, float], *, last: int) -> None:
        progress = self.progress
        progress.step += 1
        progress.losses.append(record.get("loss", record.get("value_loss", 0.0)))
        progress.last = record
        progress.seconds += record["step_s"]
        progress.kept[CONTROLLER] = self.controller.as_dict()
        progress.kept[MISMATCH] = list(self.experience_scorer.mismatch_limits.first)
        shown = self._due(self.job.settings.log_every, progress.step) or progress.step == last
        if self.ranks.first and shown:
            emit("step", **record)

    @staticmethod
    def _due(every: int, iteration: int) -> bool:
        return bool(every) and iteration % every == 0

    def _evaluate_and_save(self, *, last: int) -> None:
        settings, progress = self.job.settings, self.progress
        evaluate, improved = settings.evaluate, False
        if self._due(evaluate.eval_steps, progress.step) or progress.step == last:
            when = "after" if progress.step == last else "during"
            sign = direction(settings.objective, evaluate.best_metric)
            improved = judge(progress, self.evaluate(when), evaluate, sign)
        wanted = improved and (evaluate.keep == "best" or settings.save_steps > 0)
        if progress.step < last and (wanted or self._due(settings.save_steps, progress.step)):
            with self._states_on_device():
                saving.save(self.engine, self.job, self.ranks, progress, self.others)
            if self.states.away:
                self.rollout_engine.sync_weights()

    @contextmanager
    def _states_on_device(self) -> Iterator[None]:
        """Bring the optimizer states back to the device, in the place of the sleeping engine."""
        if self.states.away:
            self.rollout_engine.sleep()
        with self.states.on_device():
            yield

    @property
    def others(self) -> saving.Others:
        """Engines besides the policy's whose state is in a checkpoint."""
        return {} if self.critic is None else {CRITIC: self.critic.active}

    def _leave(self) -> dict[str, float]:
        """Load the best weights if they are to be kept; return the metrics of what is kept."""
        progress, best = self.progress, self.progress.best
        latest = {k: v for k, v in progress.evaluations[-1].items() if k != "step"}
        if self.job.settings.evaluate.keep == "last" or best is None or best.step == progress.step:
            if not self.eval_responses:  # resumed with nothing left to do
                self.evaluate("after")
            return latest
        path = self.job.checkpoints / checkpoint.name_of(best.step)
        with self._states_on_device():
            saving.load_weights(self.engine, path, self.ranks)
            saving.load_others(self.others, path)
        self.rollout_engine.sync_weights()
        return self.evaluate("best")
