"""All jobs that two ranks train for the tests: one launch for the default suite, one for the rest.

The persistence threshold is 0: with DeepSpeed's default ZeRO-3 would not partition such models.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.training.job import Evaluate, Loss, Peft, TrainJob, Zero
from tests.settings import Batch, Launch, Optim, Settings
from tests.tiny import save_base
from tests.training import online
from tests.training.datasets import Row, answer, pair, user, write
from tests.training.online import Bench, Finished, save_chatty, write_prompts
from tests.training.places import make_job, run_jobs

ZERO2, ZERO3 = Zero(2), Zero(3, persistence_threshold=0)
LORA = Peft("lora", rank=4, alpha=8)
QLORA = replace(LORA, kind="qlora")
CUT_AT = 36
"""Tokens: rows with words of six letters have one more and lose their end."""


@dataclass(frozen=True)
class Wanted:
    """A job: its settings, kinds of base and data, and the job and step it resumes from."""

    settings: Settings
    base: str = "tied"
    data: str = "words"
    resumes: str | None = None
    at: int = 2

    def but(self, **changes: Any) -> Wanted:
        """Return the job with changed settings."""
        return replace(self, settings=replace(self.settings, **changes))


SHORT = Settings(
    optim=Optim(lr=5e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=4, global_batch_size=8, max_steps=4, max_len=64),
    peft=LORA,
    zero=ZERO2,
    save_steps=0,
    probes=8,
)
ZERO3_LORA = replace(SHORT, zero=ZERO3)
DORA = {"peft": replace(LORA, use_dora=True)}
PATTERNS = {
    "peft": replace(
        LORA,
        use_rslora=True,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
        alpha_pattern={"q_proj": 32.0},
        exclude_modules=("down_proj",),
        modules_to_save=("embed_tokens",),
    )
}
FP32 = {"dtype": "float32", "optim": replace(SHORT.optim, weight_decay=0.1)}
STAGES = {
    "full_zero3": Wanted(
        replace(ZERO3_LORA, peft=Peft(), batch=replace(SHORT.batch, max_steps=6, max_len=CUT_AT))
    ),
    "qlora_zero2": Wanted(replace(SHORT, peft=QLORA)),
    "lora_zero2": Wanted(SHORT),
    "checkpointed_zero3": Wanted(
        replace(ZERO3_LORA, gradient_checkpointing=True, gradient_checkpointing_reentrant=True)
    ),
    "dora_zero2": Wanted(replace(SHORT, **DORA)),
    "dora_zero3": Wanted(replace(ZERO3_LORA, **DORA)),
    "patterns_zero2": Wanted(replace(SHORT, **PATTERNS)),
    "patterns_zero3": Wanted(replace(ZERO3_LORA, **PATTERNS)),
    "rows_untied_zero2": Wanted(replace(SHORT, new_tokens=("copy", "<tool>")), "rows_untied"),
    "fp32_zero2": Wanted(replace(SHORT, **FP32)),
    "fp32_zero3": Wanted(replace(ZERO3_LORA, **FP32)),
    "fp32_offload_zero3": Wanted(
        replace(SHORT, **FP32, zero=replace(ZERO3, offload_param="cpu", offload_optimizer="cpu"))
    ),
}
REWARD = Wanted(
    Settings(
        objective="reward",
        optim=Optim(lr=2e-3, warmup_ratio=0.1),
        batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=6, max_len=128),
        save_steps=0,
        probes=9,
    ),
    data="pairs",
)
REWARDS = {
    "reward_lora_zero3": REWARD.but(peft=LORA, zero=ZERO3),
    "reward_qlora_zero2": REWARD.but(peft=QLORA, zero=ZERO2),
}
# A rate that rises until nothing is learned any more: the best state is not the last one.
RISING = Settings(
    peft=replace(LORA, target_modules=("q_proj", "down_proj")),
    zero=ZERO2,
    optim=Optim(lr=1.0, scheduler="linear", warmup_ratio=1.0),
    batch=Batch(micro_batch_size=8, global_batch_size=16, max_steps=8, max_len=64),
    evaluate=Evaluate(eval_steps=2, keep="best"),
    save_steps=1,
    max_ckpt_num=1,
    probes=3,
)
# A rate that rises linearly to 1e30 leaves bf16 within a step or two.
ENDLESS = Optim(lr=1e30, scheduler="linear", warmup_ratio=0.9)
COURSES = {
    "best": Wanted(replace(RISING, evaluate=replace(RISING.evaluate, early_stop_patience=1))),
    "best_zero3": Wanted(replace(RISING, peft=Peft(), zero=ZERO3)),
    "diverges": Wanted(replace(SHORT, optim=ENDLESS, zero=Zero(0), save_steps=1)),
}
RESUMED = Settings(
    optim=Optim(lr=5e-3, warmup_ratio=0.2),
    # 50 examples and 16 a step: step 4 is smaller, and step 5 begins the second epoch.
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=5, max_len=128),
    zero=ZERO2,
    save_steps=2,
    max_ckpt_num=0,
    probes=3,
)
DROPOUT = replace(LORA, dropout=0.1, target_modules=("q_proj", "down_proj"))
WITH_DROPOUT = replace(RESUMED, peft=DROPOUT)
RESUMES = {
    "lora_3": replace(WITH_DROPOUT, zero=Zero(3), gradient_checkpointing=True),
    "qlora_2": replace(RESUMED, peft=replace(DROPOUT, kind="qlora")),
    "fp32_2": replace(RESUMED, peft=replace(DROPOUT, dropout=0.0), dtype="float32"),
    "8bit_2": replace(WITH_DROPOUT, optim=replace(RESUMED.optim, optimizer="adamw_8bit")),
    "full_3": replace(RESUMED, zero=Zero(3), evaluate=Evaluate(eval_steps=2)),
    "half_2": replace(RESUMED, dtype="float16", batch=replace(RESUMED.batch, max_steps=20)),
    "dpo": replace(WITH_DROPOUT, objective="dpo", zero=Zero(3), evaluate=Evaluate(eval_steps=2)),
    "kto": replace(WITH_DROPOUT, objective="kto"),
}
DATA_OF = {
    "sft": "fifty_words", "dpo": "fifty_pairs", "kto": "labelled", "orpo": "fifty_pairs",
    "simpo": "fifty_pairs",
}  # fmt: skip
TWO_STEPS = replace(RESUMED, peft=LORA, save_steps=0, batch=replace(RESUMED.batch, max_steps=2))
OBJECTIVES = {
    name: Wanted(replace(TWO_STEPS, objective=name), data=DATA_OF[name])
    for name in ("kto", "orpo", "simpo")
}
TEXTS = Wanted(
    Settings(
        dtype="float32",
        # A large epsilon makes AdamW follow the gradient, as SGD does.
        optim=Optim(lr=0.03, eps=1.0, weight_decay=0.01, scheduler="constant", max_grad_norm=1e9),
        batch=Batch(4, 8, max_steps=2, max_len=256),
        launch=Launch(nproc=2, threads=1),
        mask="every_token",
        zero=ZERO2,
        save_steps=0,
        probes=4,
    ),
    data="texts",
)
OF_PAIRS = replace(TEXTS, data="pairs").but(
    mask="every_answer",
    batch=replace(TEXTS.settings.batch, micro_batch_size=2, global_batch_size=4),
)
SHARED_DPO = OF_PAIRS.but(objective="dpo", peft=LORA)
SHARED = {
    "sft": TEXTS,
    "dpo": replace(SHARED_DPO.but(loss=Loss(nll=0.5)), base="one_key_head"),
    "experts": replace(
        TEXTS.but(router_aux_loss_coef=0.5, gradient_checkpointing=True), base="experts"
    ),
    "experts_dpo_zero3": replace(
        SHARED_DPO.but(zero=ZERO3, router_aux_loss_coef=0.5), base="experts"
    ),
    "reward": OF_PAIRS.but(
        objective="reward", peft=LORA, zero=ZERO3, optim=replace(TEXTS.settings.optim, lr=0.001)
    ),
}
"""Jobs whose losses and gradients do not depend on the ranks that share a row."""


def shared(name: str, sharing: int, nproc: int = 2) -> Wanted:
    """Return a job of `SHARED` whose rows are divided over `sharing` ranks."""
    return SHARED[name].but(launch=Launch(nproc=nproc, threads=1, sequence_parallel=sharing))


JOBS = {**STAGES, **REWARDS, **COURSES, **OBJECTIVES}
for name, settings in RESUMES.items():
    data = DATA_OF[settings.objective]
    JOBS[f"whole_{name}"] = Wanted(settings, data=data)
    JOBS[f"again_{name}"] = Wanted(settings, data=data, resumes=f"whole_{name}")
JOBS["ended_lora_3"] = replace(JOBS["again_lora_3"], at=5)
for name in SHARED:
    JOBS |= {f"{name}_over_{sharing}": shared(name, sharing) for sharing in (1, 2)}
DEFAULT = (
    "full_zero3", "qlora_zero2", "rows_untied_zero2", "reward_lora_zero3", "whole_lora_3",
    "again_lora_3", "ended_lora_3", "best", "dpo_over_1", "dpo_over_2", "diverges", *OBJECTIVES,
)  # fmt: skip
"""Jobs of the default suite, with every kind of file, objective, restart and sharing once."""


class Trained:
    """Every job by name. The first access to a job trains all of its launch."""

    def __init__(self, folder: Path, dataset: Path, tokenizer: Any) -> None:
        self.folder, self._words, self._tokenizer = folder, dataset, tokenizer
        self._trained: dict[str, TrainJob] = {}
        self._online: Finished | None = None
        self._broken: dict[str, Exception] = {}

    def __getitem__(self, name: str) -> TrainJob:
        if name not in self._trained:
            self._launch("default" if name in DEFAULT else "slow")
        return self._trained[name]

    @property
    def online(self) -> Finished:
        """The online runs of the default launch."""
        if self._online is None:
            self._launch("default")
        assert self._online is not None
        return self._online

    def bench(self, folder: Path) -> Bench:
        """Return a folder for online runs."""
        return Bench(folder, {k: self._base(k) for k in ("plain", "chatty")}, self._data("prompts"))

    def _launch(self, kind: str) -> None:
        if kind in self._broken:
            raise self._broken[kind]
        default, folder = kind == "default", self.folder / kind
        jobs = self._jobs(folder, {n: job for n, job in JOBS.items() if (n in DEFAULT) == default})
        bench, runs = self.bench(folder / "online"), online.DEFAULT if default else {}
        of_runs = [bench.job(name, run) for name, run in runs.items()]
        (folder / "engines").mkdir()
        try:
            events = run_jobs(folder, [*jobs.values(), *of_runs], checks=folder / "engines")
        except Exception as error:  # a rank alone has failed, and no job is complete
            self._broken[kind] = error
            raise
        self._trained |= jobs
        if default:
            self._online = Finished.of(bench.folder, of_runs, events)

    def train(self, folder: Path, wanted: Mapping[str, Wanted], nproc: int) -> dict[str, TrainJob]:
        """Train jobs in one launch."""
        jobs = self._jobs(folder, wanted)
        run_jobs(folder, list(jobs.values()), nproc)
        return jobs

    def _jobs(self, folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, TrainJob]:
        jobs: dict[str, TrainJob] = {}
        for name, job in wanted.items():
            resume = None
            if job.resumes:
                resume = jobs[job.resumes].checkpoints / f"step-{job.at:08d}"
            inputs = self._base(job.base), self._data(job.data)
            more = {"resume": resume, "max_truncated": 0.4}
            jobs[name] = make_job(folder / name, job.settings, *inputs, **more)
        return jobs

    def _base(self, kind: str) -> Path:
        """Make each kind of base once."""
        path, far = self.folder / f"base_{kind}", {"max_position_embeddings": 512}
        if path.exists():
            return path
        sizes: dict[str, dict[str, Any]] = {
            "plain": {"hidden_size": 128, "intermediate_size": 256},  # heads of 32, as vLLM serves
            "tied": far,
            "rows_untied": {"tie_word_embeddings": False},
            "one_key_head": {"num_key_value_heads": 1, **far},
            "experts": {
                "kind": "Qwen2Moe", "hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
                "tie_word_embeddings": False, **far,
            },
        }  # fmt: skip
        if kind == "chatty":
            return save_chatty(path)
        save_base(path, self._tokenizer, **sizes[kind])
        if kind == "tied":  # many bases have none, and no reward model should need it
            (path / "generation_config.json").unlink()
        if kind == "rows_untied":
            from tasks.weights.tokens.add_tokens import grow

            grow(path, ["copy", "<tool>"], multiple=8)
        return path

    def _data(self, kind: str) -> Path:
        """Make each kind of data once."""
        path = self._words if kind == "words" else self.folder / f"data_{kind}"
        if path.exists():
            return path
        path.mkdir(parents=True)
        if kind == "prompts":
            return write_prompts(path)
        for split, count in (("train", 50), ("heldout", 10)):
            write(path, rows_of(kind, count, seed=count), split)
        return path


def rows_of(kind: str, count: int, *, seed: int) -> list[Row]:
    """Make rows of very different lengths; good answers are in capitals."""
    draw = random.Random(seed)

    def word() -> str:
        length = draw.choice((draw.randint(1, 12), draw.randint(3, 6), draw.randint(20, 60)))
        return "".join(draw.choice("abcdef") for _ in range(length))

    rows: list[Row] = []
    for number in range(count):
        right, name = word(), f"s{number}"
        row: Row = {"id": name, "messages": [user(f"copy {right[:5]}"), answer(right)]}
        if kind.endswith("pairs"):
            row = pair(name, "say", right.upper(), right + "a")
        elif kind == "texts":
            row = {"id": name, "text": right * draw.choice((1, 1, 3))}
        elif kind == "labelled":
            row["desirable"] = number % 2 == 0
            row["messages"][1] = answer(right.upper() if row["desirable"] else right)
        rows.append(row)
    return rows
