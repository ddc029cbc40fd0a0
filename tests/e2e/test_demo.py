"""The main command, whole: SFT, a reward model, PPO; and single steps.

From an empty folder and at full length, 7 minutes on two cores, so they run in `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import open_artifact, verify
from tests.e2e.conftest import Run, children, curve
from tests.e2e.test_online import OF_CRITICS, keys_of

pytestmark = pytest.mark.slow
STEPS = ("sft", "reward", "ppo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain") / "runs"


@pytest.fixture(scope="module")
def chain(rlhf: Callable[..., Run], folder: Path) -> Run:
    """`+exp=qlora` from an empty folder."""
    return rlhf(folder, "+exp=qlora")


def test_every_step_runs_all_stages(chain: Run) -> None:
    assert chain.code == 0, chain.output
    names = [stage["name"] for stage in chain.summary["stages"]]
    for step in STEPS:
        own = [name.partition(".")[2] for name in names if name.startswith(f"{step}.")]
        assert own[-4:] == ["gather", "merge", "convert", "smoke_eval"]
    assert names[-1] == "register"
    for stage in chain.summary["stages"][:-1]:
        assert verify(open_artifact(Path(stage["artifact"]))) == []
    assert chain.summary["served"] == chain.stage("ppo.convert")["artifact"]


def test_what_was_trained_is_what_is_served(chain: Run) -> None:
    for step in STEPS:
        gathered = chain.stage(f"{step}.gather")["drift"]
        assert gathered["max_difference" if step == "reward" else "max_kl"] == 0.0
    assert chain.stage("ppo.smoke_eval")["drift"]["mean_kl"] < 1e-3
    served = keys_of(Path(chain.summary["served"]))
    assert [key for key in served if any(part in key for part in OF_CRITICS)] == []
    assert (Path(chain.stage("ppo.train")["artifact"]) / "critic").is_dir()


def test_evaluation_results_meet_the_bars(chain: Run) -> None:
    """Measured on the model that vLLM serves, with evaluation prompts."""
    scores = chain.summary["eval"]
    pairs = children(chain)["reward.smoke_eval"].data.metrics
    assert pairs["eval/after"] >= 0.90
    assert scores["scored_after"] - scores["scored_before"] >= 1.0
    assert scores["drawn_after"] > scores["drawn_before"]
    assert scores["kl"] <= 0.5
    assert max(curve(chain, "train/mismatch/mean_abs", stage="ppo.train")) <= 0.01


def test_ppo_begins_with_what_sft_learned(chain: Run) -> None:
    """Quantising the merged SFT model again would leave 4 % of 17 (decision 18)."""
    begins = curve(chain, "train/reward/function", stage="ppo.train")[0]
    assert begins == pytest.approx(chain.summary["eval"]["drawn_before"], abs=0.1)


def test_a_second_run_reuses_all_of_it(chain: Run, folder: Path, rlhf: Callable[..., Run]) -> None:
    again = rlhf(folder, "+exp=qlora")
    assert again.code == 0, again.output
    assert all(stage["reused"] for stage in again.summary["stages"][:-1])
    assert again.summary["eval"] == chain.summary["eval"]


@pytest.mark.parametrize("experiment", ["sft_qlora", "reward", "grpo"])
def test_a_single_step_learns(
    experiment: str, chain: Run, folder: Path, rlhf: Callable[..., Run]
) -> None:
    done = rlhf(folder, f"+exp={experiment}")
    assert done.code == 0, done.output
    assert done.stage("prepare_base")["reused"]
    scores = done.summary["eval"]
    assert scores["before"] < scores["after"]
    assert scores["after"] >= 0.85
