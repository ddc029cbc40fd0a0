"""Run by torchrun: what a rank's memory really grows to in three steps on the longest samples.

Measured is resident memory, from before the model is loaded and when all libraries are.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tasks.bf16_linear import use_fp32_where_faster
from tasks.training.engine import Ranks, start_engine
from tasks.training.examples import open_examples
from tasks.training.job import TrainJob
from tasks.training.model import load_model, load_tokenizer
from tasks.training.zero_config import deepspeed_config
from tests.training.several_jobs import take_steps


def allocated() -> int:
    """Bytes of this process that are resident, mapped files included: weights are mapped."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


class Peak:
    """The most that `allocated` says, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.value = allocated()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.value = max(self.value, allocated())
            time.sleep(0.003)

    def during(self, work: Callable[[], object]) -> tuple[object, int]:
        """What `work` gives, and the peak while it ran."""
        self.value = allocated()
        result = work()
        return result, self.value


def main(path: Path) -> None:
    use_fp32_where_faster()
    job = TrainJob.read(path)
    ranks = Ranks()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    if job.settings.peft.kind != "none":
        import bitsandbytes  # noqa: F401
        import peft  # noqa: F401
    config = deepspeed_config(job.settings, ranks.world_size)
    tokenizer = load_tokenizer(job)
    examples = open_examples(job.data)
    from tasks.training.objectives import objective

    chosen = objective(job.settings.objective, job.settings.loss)
    before, peak = allocated(), Peak()
    model, loading = peak.during(lambda: load_model(job, ranks, config, tokenizer=tokenizer))
    loaded = allocated()
    engine, starting = peak.during(lambda: start_engine(model, config, job.settings.optim))
    started = allocated()
    _, training = peak.during(lambda: take_steps(engine, examples, chosen, job, ranks))
    found = {"loading": loading, "loaded": loaded, "starting": starting, "started": started,
             "training": training, "after": allocated()}  # fmt: skip
    everyone = ranks.all_objects({name: value - before for name, value in found.items()})
    if ranks.first:
        (job.out / "memory.json").write_text(json.dumps(everyone))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
