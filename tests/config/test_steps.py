"""A chain of several steps: overrides of each, and its plan."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from flows.chain.handoff import DryRun
from flows.chain.plan import check, forecast, render
from flows.chain.steps import Step, chain_steps, compose
from tasks.core.errors import ConfigError, DataError
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import FOREVER
from tasks.pipeline.stage import Mechanism, Stage, StageResult
from tasks.serving.vllm.job import VllmChild
from tasks.train import check_rows
from tests.config.test_plan import CHAIN

RUNS = Path("/nowhere/runs")


@cache
def linked(*overrides: str) -> dict[str, Step]:
    arguments = ["+exp=qlora", f"paths.runs={RUNS}", *overrides]
    return {link.name: link for link in chain_steps(compose(arguments), arguments)}


def test_overrides_of_a_step_win_over_the_runs_and_the_command_line_over_both() -> None:
    chain = linked(
        "steps.ppo.rl.iterations=3", "rl.iterations=7", "train.lr=0.1", "steps.sft.train.lr=0.2",
        "steps.ppo.train.lr=0.3", "steps.ppo.train.lr=0.4",
    )  # fmt: skip
    settings = [link.composed.settings for link in chain.values()]
    assert list(chain) == [each["train"]["objective"] for each in settings]
    assert [each["train"]["lr"] for each in settings] == [0.2, 0.1, 0.4]
    assert settings[2]["rl"]["iterations"] == 3


def test_the_model_that_each_step_begins_with() -> None:
    composed = compose([])
    composed.settings["steps"] = {"r": ["train=reward"], "a": [], "b": []}
    for steps, wanted in (
        (list(linked().values()), [(False, False), (False, True), (True, True)]),
        (chain_steps(composed, []), [(False, False), (True, False), (True, True)]),
    ):
        assert [(step.rewarded, step.begins_with is not None) for step in steps] == wanted


def test_problems_of_several_steps_are_reported_at_once() -> None:
    chain = linked("steps.sft.train.best_metric=x", "steps.ppo.rollout.temperature=0.7",
                   "steps.ppo.rollout.top_p=0.9")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check(list(chain.values()))
    lines = caught.value.details
    assert [line for line in lines if line.startswith("sft: ") and "train.best_metric" in line]
    assert [line for line in lines if line.startswith("ppo: ") and "rollout.temperature" in line]
    assert not RUNS.exists()


def test_the_plan_of_three_steps() -> None:
    chain = linked()
    text = render(list(chain.values()))
    places = [text.index(f"step {name}:\n") for name in chain]
    assert places == sorted(places)
    names = {name: [stage for stage, _ in forecast(link)] for name, link in chain.items()}
    assert names["sft"] == CHAIN
    assert names["ppo"] == [CHAIN[0], "rollout_base", *CHAIN[2:]]
    assert text.count("\n  register ") == 1
    assert text.index("\n  register ") > places[-1]


class Recording:
    """A mechanism for a whole run that runs nothing, and records the inputs of each stage."""

    patience, logs, store = FOREVER, RUNS / "logs", RUNS / "artifacts"

    def __init__(self, trains: str = "") -> None:
        self.trains = trains  # the step whose training is not reused
        self.inputs: dict[str, dict[str, str]] = {}
        self.name = ""

    def step(self, name: str) -> Any:
        self.name = name
        return nullcontext(self)

    def run(self, stage: Stage, function: Any, *, inputs: Any, **_: Any) -> StageResult:
        name = f"{self.name}.{stage.name}"
        if name == f"{self.trains}.train":
            function(Path(name))
        self.inputs[name] = {key: str(artifact.path) for key, artifact in inputs.items()}
        return StageResult(stage.name, Artifact(stage.kind, Path(name), ""), True, 0, (), None, {})


def inputs_of(*overrides: str) -> dict[str, dict[str, str]]:
    from flows.chain.run_chain import _deliver

    recording = Recording()
    nobody = DryRun(Path("/nowhere/artifacts"), frozenset()).scorer
    chain = list(linked(*overrides).values())
    _deliver(chain, cast(Mechanism, recording), nobody, VllmChild(), None)
    return recording.inputs


def test_a_qlora_step_continues_the_adapter_of_the_step_before() -> None:
    """Rows of all steps come before the first training."""
    inputs = inputs_of()
    assert list(inputs)[:4] == [
        "sft.prepare_data", "reward.prepare_data", "ppo.prepare_data", "sft.prepare_base"
    ]  # fmt: skip
    assert "adapter" not in inputs["sft.train"]
    for link in ("reward", "ppo"):
        assert inputs[f"{link}.train"]["adapter"] == "sft.gather"
        assert inputs[f"{link}.train"]["base"] == "sft.prepare_base"
    # The same base in 4 bits for rollouts and the merge; compared with what was served before.
    assert inputs["ppo.rollout_base"]["base"] == "sft.prepare_base"
    assert inputs["ppo.merge"]["base"] == "sft.prepare_base"
    assert inputs["ppo.smoke_eval"]["base"] == "sft.convert"


class Checking:
    """A scorer that refuses the rows of online steps, and records the rows that it has checked."""

    measure = None

    def __init__(self) -> None:
        self.rows: list[str] = []

    def perform(self, function: Any, settings: Any, base: Path, data: Path, *_: Any) -> None:
        assert (function, base.name) == (check_rows, "sft.prepare_base")
        self.rows.append(data.name)
        if settings.online:
            raise DataError("train.jsonl: no", hint="data.max_truncated=0.5 or mend the rows")


@pytest.mark.parametrize("trains", ["sft", "reward", ""])
def test_rows_of_later_steps_are_tokenised_before_the_first_training(trains: str) -> None:
    """With the base's tokenizer; an error names the step. Reused results start no child."""
    from flows.chain.run_chain import _deliver

    recording, scorer, steps = Recording(trains), Checking(), list(linked().values())
    with pytest.raises(DataError) if trains else nullcontext() as caught:
        _deliver(steps, cast(Any, recording), cast(Any, scorer), VllmChild(), None)
    assert scorer.rows == (["reward.prepare_data", "ppo.prepare_data"] if trains else [])
    if trains:
        assert f"{trains}.gather" not in recording.inputs
        assert caught.value.stage == "ppo.train"
        assert caught.value.hint == "steps.ppo.data.max_truncated=0.5 or mend the rows"


@pytest.mark.parametrize(("paths", "rows"), [("aba", []), ("aab", ["1", "2"]), ("abb", [])])
def test_rows_are_checked_with_the_tokenizer_of_the_model_that_a_step_starts_from(
    paths: str, rows: list[str]
) -> None:
    """After a reward model and two steps, the last step starts from what the second has trained."""
    from flows.chain.run_chain import _check_rows

    composed, scorer = compose([]), Checking()
    composed.settings["steps"] = {"r": ["train=reward"], "a": [], "b": []}
    steps = chain_steps(composed, [])
    for step, path in zip(steps, paths, strict=True):
        step.composed.settings["model"]["path"] = path
    artifacts = [Artifact("dataset", Path(str(number)), "") for number in range(3)]
    base = Artifact("base", Path("sft.prepare_base"), "")
    _check_rows(steps, artifacts, base, cast(Any, scorer))
    assert scorer.rows == rows


def test_a_step_with_another_adapter_begins_with_the_merged_model() -> None:
    inputs = inputs_of("steps.ppo.peft=lora", "steps.ppo.peft.rank=16")
    assert "adapter" not in inputs["ppo.train"]
    assert inputs["ppo.train"]["base"] == "sft.convert"
    with pytest.raises(ConfigError, match="peft.rank=16") as caught:
        linked("steps.ppo.peft.rank=16")
    assert "steps.ppo.peft=lora" in caught.value.hint
    linked("steps.ppo.peft.dropout=0.1")
