"""`rollout=server` with real vLLM servers: syncs are proven, and faults of servers are noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import StageProcessError
from tasks.training.job import Peft, TrainJob, Zero
from tests.commands import run_ranks
from tests.rl.online import Bench, Finished, Run, finish
from tests.settings import Batch, Launch, Loop, Settings
from tests.training.conftest import make_tokenizer, save_base
from tests.training.places import stitched

pytestmark = pytest.mark.slow  # servers start for a minute each time

SERVERS = {
    "engine": "server",
    "servers": 2,
    "temperature": 0.8,
    "max_new_tokens": 16,
    "max_prompt_len": 16,
    "offload_trainer": False,
    "kv_cache_gib": 0.1,
    "max_num_seqs": 32,
}
POLICIES = {"lora": (Peft(kind="lora", rank=8, alpha=24), 2), "full": (Peft(), 3)}
FAULTS = {
    "lora": ("old adapter 0.02", "old adapter 0.002", "base 0.02", "base 0.002"),
    "full": ("reload does nothing 0.02", "reload does nothing 0.002"),
}
"""Faults of one of two servers, with the size of the policy's step, by policy."""


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own, which vLLM computes with an adapter's matrices, too."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    return save_base(tmp_path_factory.mktemp("untied"), make_tokenizer(), **sizes)


@pytest.fixture(scope="module", params=list(POLICIES))
def seen(
    request: pytest.FixtureRequest,
    base32: Path,
    untied: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, list[Mapping[str, Any]]]:
    """The policy's name, and the observations of two ranks."""
    name, out = request.param, tmp_path_factory.mktemp("servers")
    (peft, stage), base = POLICIES[name], untied if name == "lora" else base32
    settings = Settings(
        objective="grpo",
        peft=peft,
        zero=Zero(stage=stage),
        batch=Batch(micro_batch_size=1, global_batch_size=2),
        launch=Launch(nproc=2),
        online={"rl": vars(Loop()), "rollout": SERVERS, "reward": {}},
    )
    TrainJob(settings, base, "b", base, out, out).write(out / "job.json")
    try:
        run_ranks("tests.rl.rollout.server_program", str(out / "job.json"), log_path=out / "log")
    except StageProcessError:
        print((out / "log").read_text()[-5000:])
        raise
    return name, [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_responses_are_the_policys_at_each_version(seen: Any) -> None:
    for rank in seen[1]:
        assert rank["versions"] == [1, 2, 3]
        assert "before the policy was synced" in rank["unpublished"]
        assert "has changed since" in rank["stale"]
        assert rank["differs"] < 0.01
        assert rank["differs_after"] < 0.01
        assert rank["stale_differs"] > 5 * rank["differs"], "the comparison can tell"
        assert rank["mismatch"] < 0.01
        assert rank["behind"] < 0.05, "greedy"
        assert rank["again"] is True, "same weights, prompts and seeds"
        assert all(rank["ended"])
        assert rank["of version"] == [1]
    first, second = seen[1]
    assert first["none"] == [], "a rank without prompts"
    assert second["none"] is True
    assert len(first["replies"]) == 6
    assert len(second["replies"]) == 4


def test_responses_sampled_ahead_are_those_of_the_older_version(seen: Any) -> None:
    for rank in seen[1]:
        assert rank["ahead"] is True
        assert rank["ahead of version"] == [2]


def test_a_server_with_an_old_version_is_named(seen: Any) -> None:
    name, ranks = seen
    for rank in ranks:
        assert set(rank["faults"]) == {k for f in FAULTS[name] for k in (f, f"{f}, then right")}
        for fault in FAULTS[name]:
            message = rank["faults"][fault]
            assert message.startswith("TrainingError: http://127.0.0.1:"), fault
            assert rank["faults"][f"{fault}, then right"] == ""


def test_nothing_is_left_behind(seen: Any) -> None:
    first, _ = seen[1]
    assert len(first["published"]) == 1, "only the last version"
    assert first["left"] == []


@pytest.fixture(scope="module")
def online(
    base32: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Finished, Bench]:
    """GRPO with two servers and one step of staleness, stopped after four of six iterations."""
    rl = {"iterations": 6, "kl_coef": 0.0, "staleness": 1, "mismatch_limit": 0.1}
    rollout = {**SERVERS, "max_prompt_len": 40, "max_new_tokens": 8, "temperature": 1.0}
    whole = Run(rl, {"objective": "grpo", "dtype": "bfloat16", "save_steps": 4}, rollout)
    bench = Bench(tmp_path_factory.mktemp("online"), {"base": base32}, data)
    return finish(bench, {"whole": whole, "resumed": replace(whole, resumes="whole", at=4)}), bench


def test_an_iteration_trains_on_the_version_before(online: tuple[Finished, Bench]) -> None:
    steps = online[0].steps["whole"]
    # Nothing is sampled ahead over the checkpoint after the fourth iteration.
    assert [step["staleness"] for step in steps] == [0, 1, 1, 1, 0, 1]
    assert all(step["mismatch/mean_abs"] < 0.01 for step in steps)
    fresh = [step["off_policy/mean_abs"] for step in steps if not step["staleness"]]
    stale = [step["off_policy/mean_abs"] for step in steps if step["staleness"]]
    assert max(fresh) < 0.01 < min(stale), "the policy's move is no mismatch"


def test_a_resumed_run_samples_what_the_whole_one_did(online: tuple[Finished, Bench]) -> None:
    whole, resumed = (online[0].steps[name] for name in ("whole", "resumed"))
    assert [step["step"] for step in resumed] == [5, 6]
    for ours, theirs in zip(resumed, whole[4:], strict=True):
        assert ours["staleness"] == theirs["staleness"]
        # Servers compute in batches of their own: rounding may change a token.
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=0.02)
    first, second = (stitched(online[0][name]) for name in ("whole", "resumed"))
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < 1e-3
