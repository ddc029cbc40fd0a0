"""Checks of the trainer, through the program that training runs: torchrun and DeepSpeed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.numerics import SHAPE
from tests.gpu.suite import PROJECT, Numbers, Setting

if TYPE_CHECKING:
    from tests.settings import Settings

LENGTHS = {True: 48, False: 1024}
"""Tokens of every sample, by `Setting.tiny`."""
STEPS = 3


def base_of(setting: Setting) -> Path:
    """A random Qwen2 with a tokenizer; written once a session."""
    from tests.tiny import make_tokenizer, save_base

    path = setting.folder / f"base-{'tiny' if setting.tiny else '1.5B'}"
    if not (path / "tokenizer.json").is_file():
        sizes = {} if setting.tiny else SHAPE
        save_base(path, make_tokenizer(), device=setting.device, **sizes)
    return path


def words_of(setting: Setting) -> Path:
    """A dataset of short conversations."""
    from tests.training.conftest import write_words

    path = setting.folder / "words"
    path.mkdir(exist_ok=True)
    return write_words(path)


def zero_lora(setting: Setting) -> Numbers:
    """Train with LoRA under ZeRO-0, 2 and 3."""
    return _stages(setting, "lora", (0, 2, 3))


def zero_full(setting: Setting) -> Numbers:
    """Train all weights under ZeRO-0, 2 and 3."""
    return _stages(setting, "none", (0, 2, 3))


def zero_qlora(setting: Setting) -> Numbers:
    """Train with QLoRA under ZeRO-0 and 2; stage 3 is refused for it."""
    return _stages(setting, "qlora", (0, 2))


def zero_ranks(setting: Setting) -> Numbers:
    """ZeRO-2 and 3 on several GPUs, beside one."""
    single = replace(setting, gpus=1)
    measured: dict[str, float | str] = {}
    for kind in ("lora", "none"):
        alone = _train(single, kind, 2)[0]
        measured |= _stages(setting, kind, (2, 3), alone)
    return measured


def _stages(
    setting: Setting, kind: str, stages: tuple[int, ...], expected: list[float] | None = None
) -> Numbers:
    """The same steps under each stage: the same losses, and the memory that was estimated."""
    measured: dict[str, float | str] = {}
    for stage in stages:
        losses, numbers = _train(setting, kind, stage)
        expected = expected or losses
        _require_close(losses, expected, f"{kind}, ZeRO-{stage}, {setting.gpus} ranks")
        measured |= numbers
    return measured


def _require_close(losses: list[float], expected: list[float], name: str) -> None:
    assert all(math.isfinite(loss) for loss in losses), (name, losses)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    assert worst < 2e-2, f"{name}: losses {losses}, expected {expected}"


def _settings(setting: Setting, kind: str, stage: int) -> Settings:
    from tasks.training.job import Peft, Zero
    from tests.settings import Batch, Launch, Optim, Settings

    samples = 2
    return Settings(
        gradient_checkpointing=True,
        mask="every_token",
        save_steps=0,
        zero=Zero(stage),
        peft=Peft() if kind == "none" else Peft(kind, rank=16, alpha=32),
        optim=Optim(lr=1e-5),
        # The same samples a step, however many ranks share them.
        batch=Batch(samples, 8 * samples, max_steps=STEPS, max_len=LENGTHS[setting.tiny]),
        launch=Launch(nproc=setting.gpus),
    )


def _train(setting: Setting, kind: str, stage: int) -> tuple[list[float], Numbers]:
    """Losses of a few steps; and peak memory beside the estimate."""
    from tasks.config.checks.memory import estimate
    from tests.training.places import make_job, results, run_jobs

    base, name = base_of(setting), f"{kind}-zero{stage}-{setting.gpus}"
    settings, began = _settings(setting, kind, stage), time.monotonic()
    job = make_job(setting.folder / name, settings, base, _longest(setting))
    run_jobs(setting.folder / name, [job], nproc=setting.gpus)
    trained = results(job)
    config = json.loads((base / "config.json").read_text())
    gpu, peak = setting.device == "cuda", trained["metrics"]["peak_memory"]
    expected = estimate(config, settings, gpu=gpu).total
    if gpu and not setting.tiny:
        assert 0.7 < expected / peak < 1.3, f"{name}: {expected >> 20} of {int(peak) >> 20} MiB"
    text = f"{expected / 2**30:.1f} of {peak / 2**30:.1f} GiB, {time.monotonic() - began:.0f} s"
    return trained["losses"], {name: text}


def _longest(setting: Setting) -> Path:
    """Texts of `LENGTHS` tokens each, all of which but the first bear loss."""
    import random

    from tests.training.datasets import write

    path, draw = setting.folder / "longest", random.Random(0)
    for split, count in (("train", 64), ("heldout", 4)):
        texts = (
            "".join(draw.choices("abcdef ", k=LENGTHS[setting.tiny] - 1)) for _ in range(count)
        )
        write(path, [{"id": f"e{i}", "text": text} for i, text in enumerate(texts)], split)
    return path


def resume(setting: Setting) -> Numbers:
    """Resume a run, and compare it with the uninterrupted one.

    The bytes are equal where two uninterrupted runs have equal bytes. Where kernels add up in
    another order each time, the resumed run may be as far away as the second one is, times three.
    """
    from tasks.training.engine.checkpoint import complete
    from tasks.training.job import Peft, Zero
    from tests.settings import Batch, Launch, Optim, Settings
    from tests.training.places import files, make_job, run_jobs, weights

    settings = Settings(
        peft=Peft("lora", rank=4, alpha=8, dropout=0.1),
        zero=Zero(2),
        optim=Optim(lr=5e-3, warmup_ratio=0.2),
        batch=Batch(micro_batch_size=8, global_batch_size=16, max_steps=5, max_len=64),
        launch=Launch(nproc=1),
        save_steps=3,
        max_ckpt_num=0,
        probes=3,
    )
    folder, inputs = setting.folder / "resume", (base_of(setting), words_of(setting))
    whole, again = (make_job(folder / name, settings, *inputs) for name in ("whole", "again"))
    run_jobs(folder, [whole, again], nproc=1)
    (kept,) = (path for path in complete(whole.checkpoints) if path.name == "step-00000003")
    resumed = make_job(folder / "resumed", settings, *inputs, resume=kept)
    run_jobs(folder, [resumed], nproc=1)
    expected, tensors = files(whole.out / "shards"), weights(whole)

    def differs(job: Any) -> tuple[bool, float]:
        other = weights(job)
        apart = max(float((other[n] - t).abs().max()) for n, t in tensors.items())
        return files(job.out / "shards") != expected, apart

    (repeated, noise), (bytes_differ, apart) = differs(again), differs(resumed)
    assert repeated or not bytes_differ, "the resumed run has other bytes"
    assert apart <= 3 * noise
    return {"resumed apart": f"{apart:.1e}", "repeated apart": f"{noise:.1e}"}


def demo(setting: Setting) -> Numbers:
    """`make demo`: QLoRA SFT of the embedded model, merged, served and registered."""
    return _flow(setting, "qlora")


def online(setting: Setting) -> Numbers:
    """The same for GRPO with vLLM rollouts."""
    return _flow(setting, "grpo")


def _flow(setting: Setting, experiment: str) -> Numbers:
    runs = setting.folder / f"runs-{experiment}"
    began = time.monotonic()
    command = [sys.executable, "flows/rlhf.py", f"+exp={experiment}", f"paths.runs={runs}"]
    done = subprocess.run(command, cwd=PROJECT, check=False)
    assert done.returncode == 0, f"status {done.returncode}"
    summary = json.loads((runs / "latest" / "summary.json").read_text())
    stages = [stage["name"] for stage in summary["stages"]]
    assert "register" in stages
    return {"stages": len(stages), "seconds": round(time.monotonic() - began)}
