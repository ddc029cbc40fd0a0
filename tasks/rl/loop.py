"""The loop: hand the policy over, roll out, score, measure, estimate, update; and what it notes.

Every rank knows the whole iteration and computes the same advantages from it; only generating,
scoring, measuring and the passes of the update are shared out. An iteration is a function of
weights, optimizer states, seed and its number, so that a run that goes on from a checkpoint does
what it would have done.
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
from tasks.rl.experience.experience_scoring import Appraiser
from tasks.rl.experience.packed_rows import experience
from tasks.rl.experience.prompts import Asking
from tasks.rl.experience.records import collected, evaluated, samples_of, speeds
from tasks.rl.experience.responses import Scored
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
def _named(iteration: int) -> Iterator[None]:
    """Let every error of ours say in which iteration it was."""
    try:
        yield
    except PlumblineError as error:
        if not error.message.startswith("iteration "):
            error.message = f"iteration {iteration}: {error.message}"
            error.args = (error.message,)
        raise


@dataclass
class OnlineTrainer:
    """One online run, and where it is.

    Attributes:
        engine: DeepSpeed's, around the policy.
        critic: None where the algorithm has none.
        ranks: this process among its peers.
        job: what to do.
        online: sections `rl`, `rollout`, `reward`.
        appraiser: from replies to what the update goes by.
        answering: the engine that answers.
        states: of the optimizers; on the device for updates and checkpoints alone, where moved.
        train: asks the prompts that are learned from.
        heldout: asks those that are not.
        updater: takes the optimizer steps.
        asking: which prompts when.
        iterations: of the whole run.
        progress: every iteration and evaluation notes itself here.
        controller: of the distance to the reference.
        answered: replies to the held-out prompts, of the last evaluation.
    """

    engine: Any
    critic: Critic | None
    ranks: Ranks
    job: TrainJob
    online: Online
    appraiser: Appraiser
    answering: Engine
    states: TrainerStates
    train: Collector
    heldout: Collector
    updater: Updater
    asking: Asking
    iterations: int
    progress: Progress
    controller: kl.Controller = field(init=False)
    answered: list[Scored] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        kept = self.progress.kept.get(CONTROLLER)
        self.controller = kl.controller(self.online.loop, kept)
        self.appraiser.usual.first = list(self.progress.kept.get(MISMATCH, []))

    def run(self) -> dict[str, float]:
        """All iterations that are left, with evaluations and checkpoints between them. Emits events
        "plan", "step", "eval" and "samples".

        Returns:
            The evaluation of the state that is left in the engine.

        Raises:
            TrainingError: something is not finite, the policy has left the reference or the engine
                that answers is not the one that is trained.
        """
        progress, last = self.progress, self.iterations
        if self.ranks.first:
            epochs = self.asking.epoch_at(last)
            emit("plan", steps=last, epochs=epochs, taken=progress.step)
        self.answering.publish()
        if progress.before is None:
            progress.before = self.evaluate("before")
        while progress.step < last and not has_stopped(progress, self.job.settings.evaluate):
            with _named(progress.step + 1):
                record = self.iterate(progress.step + 1)
            self._note(record, last=last)
            self._evaluate_and_save(last=last)
        return self._leave()

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; its record."""
        begin, clock = time.perf_counter(), Clock()
        samples = self.online.loop.samples
        known = self.train.collect(iteration, self.asking, samples, clock)
        self.answering.sleep()  # an accelerator's memory; who publishes to it wakes it
        scored = [one for _, one in known]
        got = experience(scored)
        if not (self.appraiser.asks_policy_alone and self.updater.measures(len(scored))):
            with clock.phase("measure"):
                got = self.appraiser.measured(got)
        with clock.phase("estimate"):
            learned, record = self.appraiser.estimate(got, self.controller.coef, iteration)
        if "kl" in record:
            self.controller = self.controller.after(record["kl"], len(scored))
        with clock.phase("update"), self.states.on_device():
            compare = partial(self.appraiser.compare, iteration=iteration)
            record |= self.updater.update(iteration, learned, compare, of=self.iterations)
        with clock.phase("publish"):
            self.answering.publish()
        record |= collected(scored, self.online.rollout) | speeds(clock, got, begin)
        if self.ranks.first and self._due(self.job.settings.log_every, iteration):
            emit("samples", step=iteration, rows=samples_of(scored))
        return {"step": iteration, **record, "epoch": self.asking.epoch_at(iteration)}

    def evaluate(self, when: str) -> dict[str, float]:
        """Rewards of the likeliest replies to held-out prompts; emits event "eval"."""
        clock = Clock()
        numbers = list(range(len(self.heldout.prompts)))
        self.answered = [one for _, one in self.heldout.ask(numbers, 0, 1, clock, greedy=True)]
        found = evaluated(self.answered, self.online.rollout)
        if self.ranks.first:
            about = {"when": when, "step": self.progress.step}
            emit("eval", **about, eval_s=sum(clock.seconds.values()), **found)
        return found

    def _note(self, record: dict[str, float], *, last: int) -> None:
        progress = self.progress
        progress.step += 1
        progress.losses.append(record.get("loss", record.get("value_loss", 0.0)))
        progress.last = record
        progress.seconds += record["step_s"]
        progress.kept[CONTROLLER] = self.controller.as_dict()
        progress.kept[MISMATCH] = list(self.appraiser.usual.first)
        shown = self._due(self.job.settings.log_every, progress.step) or progress.step == last
        if self.ranks.first and shown:
            emit("step", **record)

    @staticmethod
    def _due(every: int, iteration: int) -> bool:
        return bool(every) and iteration % every == 0

    def _evaluate_and_save(self, *, last: int) -> None:
        settings, progress = self.job.settings, self.progress
        how, improved = settings.evaluate, False
        if self._due(how.eval_steps, progress.step) or progress.step == last:
            when = "after" if progress.step == last else "during"
            sign = direction(settings.objective, how.best_metric)
            improved = judge(progress, self.evaluate(when), how, sign)
        wanted = improved and (how.keep == "best" or settings.save_steps > 0)
        if progress.step < last and (wanted or self._due(settings.save_steps, progress.step)):
            with self._states_on_device():
                saving.save(self.engine, self.job, self.ranks, progress, self.others)
            if self.states.away:
                self.answering.publish()

    @contextmanager
    def _states_on_device(self) -> Iterator[None]:
        """Have the optimizers' states take the place of the engine, which is to be synced then."""
        if self.states.away:
            self.answering.sleep()
        with self.states.on_device():
            yield

    @property
    def others(self) -> saving.Others:
        """Engines whose state goes on beside the policy's."""
        return {} if self.critic is None else {CRITIC: self.critic.active}

    def _leave(self) -> dict[str, float]:
        """Put back the best state where that one is to stay; what it measures."""
        progress, best = self.progress, self.progress.best
        latest = {k: v for k, v in progress.evaluations[-1].items() if k != "step"}
        if self.job.settings.evaluate.keep == "last" or best is None or best.step == progress.step:
            if not self.answered:  # went on from where there was nothing left to do
                self.evaluate("after")
            return latest
        path = self.job.checkpoints / checkpoint.name_of(best.step)
        with self._states_on_device():
            saving.load_weights(self.engine, path, self.ranks)
            saving.load_others(self.others, path)
        self.answering.publish()
        return self.evaluate("best")
