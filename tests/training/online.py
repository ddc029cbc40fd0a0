"""Whole online runs on real ranks: settings, the table of runs, their launches and results."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.training.job import Evaluate, Peft, TrainJob, Zero
from tests.settings import Batch, Launch, Loop, Optim, Settings
from tests.tiny import make_tokenizer, save_base
from tests.training.datasets import user, write
from tests.training.places import Event, make_job, results, run_jobs

ONLINE = {
    "rl": {
        **vars(Loop()),
        "rollout_batch_size": 8,
        "num_generations": 2,
        "iterations": 3,
        "eval_prompts": 4,
        "ppo_epochs": 2,
        "kl_coef": 0.05,
        "mismatch_limit": 10.0,
    },
    "rollout": {
        "timeout_s": None,
        "kv_cache_gib": 0.1,
        "max_num_seqs": 64,
        "max_new_tokens": 6,
        "max_prompt_len": 40,
        "offload_trainer": False,
    },
    "reward": {},
}
SETTINGS = Settings(
    objective="ppo",
    dtype="float32",
    save_steps=2,
    max_ckpt_num=0,
    probes=4,
    peft=Peft(kind="lora", rank=4, alpha=8),
    zero=Zero(stage=2),
    optim=Optim(lr=1e-2, scheduler="constant"),
    batch=Batch(micro_batch_size=4, global_batch_size=8, max_len=64),
    launch=Launch(nproc=2, threads=1),
    evaluate=Evaluate(best_metric="reward"),
)
REWARDS = {
    # the length of a response, and a little of the prompt's.
    "reward": "return [len(c[0]['content'].encode()) / 10 + len(w) / 100\n"
    "            for c, w in zip(completions, word)]",
    "equal": "return [0] * len(completions)",
    "falling": "calls.append(0)\n    return [-len(calls)] * len(completions)",
}
"""Bodies of reward functions."""


@dataclass(frozen=True)
class Run:
    """An online run, with the run from whose checkpoint it resumes, if any."""

    rl: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    reward: str = "reward"
    base: str = "plain"
    resumes: str | None = None
    at: int = 2


def in_game(rl: Mapping[str, Any] | None = None, **settings: Any) -> Run:
    """Return a run with the environment of `data`: episodes of 2 to 4 turns.

    Trainer and engine read the same context, observations included, or the run fails.
    """
    game = {"environment": "game.py:Game", "max_turns": 4, "mismatch_limit": 1e-3, "iterations": 2}
    rollout = {"max_prompt_len": 30, "max_new_tokens": 96}
    return Run({**game, **(rl or {})}, settings, rollout, reward="", base="chatty")


GENTLE = Optim(lr=1e-3, scheduler="constant")
SEPARATE = {"critic": "separate", "iterations": 3}
FULL_GRPO = {"objective": "grpo", "peft": Peft(), "optim": GENTLE}
ONE_STEP = {"objective": "grpo", "batch": Batch(4, 16, max_len=64), "save_steps": 0}
ONE_EPOCH = {"iterations": 3, "ppo_epochs": 1, "correction": "sequence_mask"}
DAPO = {"clip_high": 0.28, "kl_coef": 0.0, "ppo_epochs": 1, "refill": 2, "mask_truncated": True}
STILL = {"optim": Optim(lr=0.0, scheduler="constant")}
GAME = in_game({"iterations": 3})
DEFAULT = {
    "whole": GAME,
    "resumed": replace(GAME, resumes="whole"),
    "full": Run({"iterations": 2}, {**FULL_GRPO, "save_steps": 0}),
}
"""Runs of the default suite."""
SLOW = {
    "plain": Run(),
    "still": Run({**ONE_EPOCH, "kl_coef": 0.0, "iterations": 1}, {**ONE_STEP, **STILL}),
    "separate_lora": Run(SEPARATE, {"zero": Zero(3)}),
    "separate_lora_resumed": Run(SEPARATE, {"zero": Zero(3)}, resumes="separate_lora"),
    "separate_lora_ended": Run(SEPARATE, {"zero": Zero(3)}, resumes="separate_lora", at=3),
    "reference_zero2": Run({"iterations": 2}, {**FULL_GRPO, "zero": Zero(2)}),
    "reference_zero3": Run({"iterations": 2}, {**FULL_GRPO, "zero": Zero(3)}),
    "dapo": Run(DAPO, {"objective": "dapo"}, base="chatty"),
    "dapo_resumed": Run(DAPO, {"objective": "dapo"}, base="chatty", resumes="dapo"),
    # The reward falls from the first iteration on, and the run returns to that iteration.
    **{
        f"best_of_{iterations}": Run(
            {"iterations": iterations},
            {"evaluate": Evaluate(eval_steps=1, best_metric="reward", keep="best")},
            reward="falling",
        )
        for iterations in (1, 3)
    },
}


@dataclass
class Bench:
    """Bases and data of online runs, and a folder for their artifacts."""

    folder: Path
    bases: Mapping[str, Path]
    data: Path

    def settings(self, run: Run, **changes: Any) -> Settings:
        """Return the settings of a run; `changes` are fields of them."""
        online = json.loads(json.dumps(ONLINE))
        online["rl"] |= run.rl
        if game := run.rl.get("environment"):
            online["rl"]["environment"] = f"{self.data / game}"
        online["rollout"] |= run.rollout
        if run.reward:
            online["reward"]["function"] = f"{self.data / run.reward}.py:score"
        return replace(SETTINGS, **{**run.settings, "online": online, **changes})

    def job(self, name: str, run: Run, **more: Any) -> TrainJob:
        """Return the job of a run, with empty folders; `more` are fields of the settings."""
        settings, resume = self.settings(run, **more), None
        if run.resumes:
            resume = self.folder / run.resumes / "checkpoints" / f"step-{run.at:08d}"
        base = self.bases[run.base]
        return make_job(self.folder / name, settings, base, self.data, resume=resume)


@dataclass
class Finished:
    """Runs of a launch: their artifacts by name, and the metrics of their iterations."""

    folder: Path
    steps: Mapping[str, list[Event]]

    @classmethod
    def of(cls, folder: Path, jobs: Sequence[TrainJob], events: Sequence[Event]) -> Finished:
        """Sort the events of a launch. Fail if a run did not end."""
        names = [job.out.parent.name for job in jobs if results(job)]
        steps: dict[str, list[Event]] = {name: [] for name in names}
        name = ""
        for event in events:
            if event["event"] == "run":
                name = event["name"]
            elif event["event"] == "step" and name in steps:
                steps[name].append(event)
        return cls(folder, steps)

    def __getitem__(self, name: str) -> Path:
        return self.folder / name / "out"


def finish(bench: Bench, runs: Mapping[str, Run | TrainJob], *, ranks: int = 2) -> Finished:
    """Run a table of runs in one launch, one after another on the same ranks."""
    jobs = [bench.job(n, run) if isinstance(run, Run) else run for n, run in runs.items()]
    return Finished.of(bench.folder, jobs, run_jobs(bench.folder, jobs, ranks))


def write_prompts(path: Path) -> Path:
    """Write prompts without answers, reward functions and an environment for them."""
    draw = random.Random(0)
    for split, count in (("train", 40), ("heldout", 6)):
        rows = []
        for number in range(count):
            word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 6)))
            row = {"id": f"{split}{number}", "messages": [user(f"say {word}")]}
            rows.append({**row, "columns": {"word": word}})
        write(path, rows, split)
    for name, body in REWARDS.items():
        (path / f"{name}.py").write_text(
            f"calls = []\ndef score(completions, word, **_):\n    {body}\n"
        )
    (path / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, word):\n"
        "        self.left = len(word) - 1\n"
        "    def step(self, text):\n"
        "        self.left -= 1\n"
        "        return f'{self.left} left', len(text) / 10, self.left == 0\n"
    )
    return path


def save_chatty(path: Path) -> Path:
    """Save a base with heads of 32, vLLM's smallest, that writes short responses untrained.

    Of its 259 tokens 161 end a response: all but those of plain text and of the chat template.
    """
    tokenizer = make_tokenizer()
    save_base(path, tokenizer, hidden_size=128, intermediate_size=256)
    kept = tokenizer("\n ", add_special_tokens=False)["input_ids"]
    ends = [i for i in range(94, 257) if i not in kept]
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    return path
