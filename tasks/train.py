"""train: base + dataset -> shards. Starts `torchrun` and checks the files of the ranks.

Every rank writes its own partition of each trained tensor; nothing is gathered. The code of the
ranks is in `tasks/training/` and `tasks/rl/`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core import errors
from tasks.core.contract import Check
from tasks.core.errors import (
    ConfigError,
    DataError,
    PlumblineError,
    StageProcessError,
    TrainingError,
)
from tasks.core.events import rewind
from tasks.core.machine import has_gpu
from tasks.pipeline.stage import StageReport
from tasks.process.launch import OnEvent, launch, python_child
from tasks.process.multinode import Leader, rendezvous
from tasks.process.output import Log
from tasks.training.engine.checkpoint import begin, identity, sweep
from tasks.training.engine.failure import WATCHDOG, out_of_memory, waited
from tasks.training.job import REWARD_URL, Launch, Settings, TrainJob
from tasks.training.tokens.truncation import truncation
from tasks.weights.files.folder import CHAT_TEMPLATE
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.quantized.nf4 import LOST_ALLOWED, LOST_OVERRIDE, lost_in_4_bits
from tasks.weights.shards import SHARDS, rank_file

Run = Callable[..., list[str]]
"""`launch` with the arguments of this stage."""
SPLITS = ("train", "heldout")
SAMPLED = 2000
"""Rows that are tokenised before an earlier step trains: a second or two."""


def train(
    out: Path,
    *,
    base: Path,
    data: Path,
    base_digest: str,
    settings: Settings,
    checkpoints: Path,
    reward: Path | None = None,
    rollout: Path | None = None,
    adapter: Path | None = None,
    max_truncated: float = 0.2,
    reward_url: str | None = None,  # with its login and tokens, which `settings` lacks
    log: Log,
    log_path: Path,
    resume: str = "auto",  # see `engine.checkpoint.choose`
    leader: Leader | None = None,  # asks the other nodes for their ranks; None on one node
    # gets each event of the ranks; first those of an interrupted run, as `replayed`
    on_event: OnEvent | None = None,
) -> StageReport:
    """Train a model; every rank writes its partitions to `out`. Other arguments: see `TrainJob`.

    Problems of settings are ConfigError, of samples DataError, of the run itself TrainingError;
    StageProcessError if a rank died.
    """
    if settings.peft.kind == "qlora" and (lost := lost_in_4_bits(read_checkpoint(base))):
        # The preflight refuses this for a folder; a base from the Hub was downloaded after it.
        raise ConfigError(
            f"model.path is a merged QLoRA model: {lost}; {LOST_ALLOWED}", hint=LOST_OVERRIDE
        )
    checkpoints.mkdir(parents=True, exist_ok=True)
    job = TrainJob(
        settings=settings,
        base=base.resolve(),
        base_digest=base_digest,
        data=data.resolve(),
        out=out.resolve(),
        checkpoints=checkpoints.resolve(),
        reward=reward.resolve() if reward is not None else None,
        rollout_base=rollout.resolve() if rollout is not None else None,
        adapter=adapter.resolve() if adapter is not None else None,
        identity=identity(settings, base_digest=base_digest, data=data, adapter=adapter),
        max_truncated=max_truncated,
    )
    run = partial(launch, stage="train", log=log, log_path=log_path)
    job, begun = begin(
        job,
        resume,
        to_universal=lambda saved, universal: run(
            python_child("tasks.training.engine.saving", str(saved), str(universal))
        ),
    )
    if begun.step:
        log.info("train: going on after step %d, from %s", begun.step, job.resume)
    events = _Events(on_event, log, settings.batch.max_len)
    for event in rewind(checkpoints, begun.step, job.resume.parent if job.resume else None):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # curves are not worth a run
            events({**event, "replayed": True})
    _launch(job, run, events, leader, reward_url)
    document = json.loads((out / "train.json").read_text())
    counted = {
        f"data/{split}_{name}": float(counts[key])
        for split, counts in events.data.items()
        for name, key in _COUNTED.items()
    }
    notes = {name: document[name] for name in ("quantization", "evaluations")}
    return StageReport(
        kind="shards",
        checks=tuple(_checks(out, document, settings.world_size)),
        metrics={**document["metrics"], **counted},
        notes={**notes, "data": events.data, "resumed_after_step": begun.step},
    )


def check_rows(
    settings: Settings,
    base: Path,
    data: Path,
    template: Path | None,
    max_truncated: float,
    splits: Sequence[str] = SPLITS,
) -> None:
    """Raise the DataError that ranks would raise for rows that they cannot use; needs torch.

    The tokenizer is that of `base`, with the chat template of the file `template` if it is given.
    """
    from tasks.training.engine.deepspeed_engine import SingleRank
    from tasks.training.model.build import load_tokenizer

    with (
        tempfile.TemporaryDirectory(prefix="plumbline-") as name,
        contextlib.redirect_stdout(io.StringIO()),  # events of a stage that does not run yet
    ):
        folder = Path(name)
        parts = [_sample(data / f"{split}.jsonl", folder) for split in splits]
        whole = all(parts)
        if template is not None:
            shutil.copyfile(template, folder / CHAT_TEMPLATE)
        most = max_truncated if whole else 1.0  # the longest rows are no fair sample
        job = TrainJob(settings, base, "", folder, folder, folder, max_truncated=most)
        tokenizer = load_tokenizer(job)
        try:
            for split in splits:
                _load(job, split, tokenizer=tokenizer, ranks=SingleRank())
        except DataError as error:
            part = "" if whole else f" (looking at up to {SAMPLED} rows of each file)"
            raise DataError(error.message + part, details=error.details, hint=error.hint) from error


def _load(job: TrainJob, split: str, **inputs: Any) -> None:
    """Tokenise the rows of a split, as the ranks do."""
    from tasks.rl.responses import load_prompts
    from tasks.training.losses import objective
    from tasks.training.tokens.data import load_split

    settings = job.settings
    if settings.online:
        limit = settings.online["rollout"]["max_prompt_len"]
        load_prompts(job.data / f"{split}.jsonl", limit=limit, **inputs)
    else:
        roles = objective(settings.objective, vars(settings.loss)).roles
        load_split(job, split, roles=roles, **inputs)


def _sample(source: Path, folder: Path) -> bool:
    """Copy `SAMPLED` rows of a file, or all of a small one, and return True if these are all.

    They are the first rows, and the longest and shortest, which a limit of tokens concerns.
    """
    with source.open("rb") as file:
        sizes = [len(line) for line in file]
    by_size, part = sorted(range(len(sizes)), key=sizes.__getitem__), SAMPLED // 4
    chosen = {*range(len(sizes))[: 2 * part], *by_size[:part], *by_size[-part:]}
    with source.open("rb") as file, (folder / source.name).open("wb") as out:
        out.writelines(line for number, line in enumerate(file) if number in chosen)
    return len(chosen) == len(sizes)


def _launch(
    job: TrainJob, run: Run, events: _Events, leader: Leader | None, reward_url: str | None
) -> None:
    """Run the ranks of this node, together with those of the other nodes."""
    how, path = job.settings.launch, job.checkpoints / "job.json"
    job.write(path)
    try:
        with (
            leader.call(path) if leader else contextlib.nullcontext(),
            rendezvous(leader.meeting if leader else None) as (meet, variables),
        ):
            run(
                torchrun(job, path, meet),
                env=rank_environment(how, reward_url) | variables,
                timeout_s=how.timeout_s,
                on_event=events,
            )
    except StageProcessError as error:
        sweep(job.checkpoints)
        if (failure := events.failure) is not None:
            kind: type[PlumblineError] = getattr(errors, failure["error"], TrainingError)
            details, hint = failure["details"], failure["hint"]
            raise kind(f"train: {failure['message']}", details=details, hint=hint) from error
        if line := next((line for line in error.details if WATCHDOG in line), ""):
            raise waited("train: a rank", line, job) from error
        if "SIGKILL" in "\n".join(error.details):
            what = "train: a rank was killed by SIGKILL, as the system does if memory runs out"
            raise out_of_memory(what, job, error.details) from error
        raise
    finally:
        if job.universal is not None:
            shutil.rmtree(job.universal, ignore_errors=True)


def torchrun(job: TrainJob, job_path: Path, meet: list[str]) -> list[str]:
    """Return the command that starts the ranks of this node; `meet` is from `rendezvous`."""
    ranks = ["--nproc-per-node", str(job.settings.launch.nproc), "-m", "tasks.training"]
    return python_child("torch.distributed.run", *meet, *ranks, str(job_path))


def rank_environment(how: Launch, reward_url: str | None = None) -> dict[str, str]:
    """Return the variables that are added to the environment of the ranks."""
    threads = str(how.threads or max(1, len(os.sched_getaffinity(0)) // how.nproc))
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # prepare has resolved everything to local folders
    }
    if reward_url:
        environment[REWARD_URL] = reward_url
    if how.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    allocator = "PYTORCH_ALLOC_CONF"
    if has_gpu(how.device) and not {allocator, "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # Torch would round pinned memory up to powers of two, and an engine that sleeps keeps its
        # weights there.
        environment[allocator] = "pinned_max_round_threshold_mb:1"
    return environment


class _Events:
    """Pass events on, and store those that the stage needs itself."""

    def __init__(self, on_event: OnEvent | None, log: Log, max_len: int) -> None:
        self._on_event, self._log, self._max_len = on_event, log, max_len
        self.failure: Mapping[str, Any] | None = None
        self.data: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "failure" and self.failure is None:
            self.failure = event
        if event["event"] == "data":
            counts = {k: v for k, v in event.items() if k not in ("event", "split")}
            self.data[event["split"]] = counts
            if text := truncation(counts, max_len=self._max_len):
                self._log.warning("train: %s.jsonl: %s", event["split"], text)
        if self._on_event is not None:
            self._on_event(event)


_COUNTED = {
    "rows": "read",
    "truncated": "truncated",
    "tokens_cut": "tokens_cut",
    "ends_cut": "ends_cut",
    "too_long": "refused",
    "equal": "equal",
}
"""Names of metrics -> names of the counts in `training/tokens/truncation.py`."""


def _checks(out: Path, document: Mapping[str, Any], world_size: int) -> list[Check]:
    """Check that losses are finite and every file is there; `gather` checks the partitions."""
    losses = document["losses"]
    finite = sum(math.isfinite(x) for x in losses)
    checks = [Check("losses", f"{len(losses)} finite", f"{finite} finite", finite == len(losses))]
    ranks = [f"{SHARDS}/{rank_file(rank, world_size)}" for rank in range(world_size)]
    for name in (document["print"], *ranks):
        there = (out / name).is_file()
        checks.append(Check(name, "present", "present" if there else "missing", there))
    return checks
