"""Policies in DeepSpeed's engines on two real ranks, sampled by vLLM and by servers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import StageProcessError
from tasks.rollout_base import rollout_base
from tasks.training.job import Peft, TrainJob, Zero
from tasks.weights.model import perform
from tests.commands import run_ranks
from tests.settings import Batch, Launch, Loop, Settings
from tests.tiny import make_tokenizer, save_base
from tests.training.online import Bench, Run, finish, write_prompts
from tests.training.places import stitched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LORA = Peft(kind="lora", rank=8, alpha=24)
ROLLOUT = {
    "engine": "vllm",
    "temperature": 0.8,
    "max_new_tokens": 16,
    "max_prompt_len": 16,
    "offload_trainer": False,
    "kv_cache_gib": 0.1,
    "max_num_seqs": 64,
}
SERVERS = {"engine": "server", "servers": 2, "max_num_seqs": 32}
POLICIES: dict[str, tuple[Peft, int, dict[str, Any]]] = {
    # by name: adapter, ZeRO stage, and what else section `rollout` says
    "lora": (LORA, 2, {}),
    "full": (Peft(), 3, {}),
    "faults": (LORA, 2, {}),
    "qlora": (replace(LORA, kind="qlora"), 2, {}),
    "dora": (replace(LORA, use_dora=True), 3, {}),
    "parallel": (LORA, 2, {"tensor_parallel": 2}),
    "server-lora": (LORA, 2, SERVERS),
    "server-full": (Peft(), 3, SERVERS),
}
LAUNCHES = [
    ("lora", "full", "faults", "qlora", "dora"),
    # vLLM supports one group size per process.
    *(("parallel",), ("server-lora",), ("server-full",)),
]


def job_of(name: str, base: Path, out: Path, ranks: int) -> TrainJob:
    """Return the job of a policy; a 4-bit one gets its dequantised base in `out`."""
    peft, stage, rollout = POLICIES[name]
    settings = Settings(
        objective="faults" if name == "faults" else "grpo",
        peft=peft,
        zero=Zero(stage=stage),
        batch=Batch(micro_batch_size=1, global_batch_size=2),
        launch=Launch(nproc=ranks),
        online={"rl": vars(Loop()), "rollout": ROLLOUT | rollout, "reward": {}},
    )
    quantization, plain = peft.quantization("bfloat16"), None
    if quantization is not None:
        plain = out / "base"
        plain.mkdir()
        log = logging.getLogger(__name__)
        rollout_base(
            plain, base=base, quantization=quantization, dtype="bfloat16", perform=perform, log=log
        )
    return TrainJob(settings, base, "b", base, out, out, rollout_base=plain)


def follow(names: Sequence[str], base: Path, folder: Path, *, ranks: int = 2) -> None:
    """Run `rollout_program`, which asserts; a failure is in a rank's file."""
    paths = []
    for name in names:
        (folder / name).mkdir()
        job_of(name, base, folder / name, ranks).write(folder / name / "job.json")
        paths.append(str(folder / name / "job.json"))
    try:
        run_ranks("tests.rl.rollout_program", *paths, log_path=folder / "log", ranks=ranks)
    except StageProcessError:
        print((folder / "log").read_text()[-5000:])
        failures = [path.read_text() for path in folder.glob("*/failure-*")]
        raise AssertionError("\n".join(failures) or "see above") from None
    finally:  # a killed engine leaves its memory there
        for left in Path("/dev/shm").glob("*-cpushm_*"):
            left.unlink()


@pytest.mark.parametrize("names", LAUNCHES, ids=" ".join)
def test_engines_follow_the_policy_and_faults_are_noticed(
    names: Sequence[str], base32: Path, tmp_path: Path
) -> None:
    if names == ("server-lora",):  # a head of its own, computed with an adapter's matrices, too
        sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
        (tmp_path / "untied").mkdir()
        base32 = save_base(tmp_path / "untied", make_tokenizer(), **sizes)
    follow(names, base32, tmp_path)


def test_an_iteration_trains_on_the_version_before(base32: Path, tmp_path: Path) -> None:
    """GRPO with two servers and one step of staleness, resumed after four of six iterations."""
    rl = {"iterations": 6, "kl_coef": 0.0, "staleness": 1, "mismatch_limit": 0.1}
    rollout = {**ROLLOUT, **SERVERS, "max_prompt_len": 40, "max_new_tokens": 8, "temperature": 1.0}
    run = Run(rl, {"objective": "grpo", "dtype": "bfloat16", "save_steps": 4}, rollout)
    for name in ("prompts", "online"):
        (tmp_path / name).mkdir()
    bench = Bench(tmp_path / "online", {"plain": base32}, write_prompts(tmp_path / "prompts"))
    online = finish(bench, {"whole": run, "resumed": replace(run, resumes="whole", at=4)})
    steps, resumed = online.steps["whole"], online.steps["resumed"]
    # Nothing is sampled ahead over the checkpoint after the fourth iteration.
    assert [step["staleness"] for step in steps] == [0, 1, 1, 1, 0, 1]
    assert all(step["mismatch/mean_abs"] < 0.01 for step in steps)
    fresh = [step["off_policy/mean_abs"] for step in steps if not step["staleness"]]
    stale = [step["off_policy/mean_abs"] for step in steps if step["staleness"]]
    assert max(fresh) < 0.01 < min(stale), "the policy's move is no mismatch"
    assert [step["step"] for step in resumed] == [5, 6]
    for ours, theirs in zip(resumed, steps[4:], strict=True):
        assert ours["staleness"] == theirs["staleness"]
        # Servers compute in batches of their own: rounding may change a token.
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=0.02)
    first, second = (stitched(online[name]) for name in ("whole", "resumed"))
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < 1e-3
