"""`plan=true`: what would run, by the keys of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.chain import handoff
from flows.chain.plan import forecast
from flows.chain.steps import Step
from flows.cli.composed import Composed
from flows.cli.config import compose_config
from tasks.core.errors import DataError
from tasks.pipeline.artifact import Origin, publish, staging

CHAIN = ["prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"]


def composed_in(tmp_path: Path, *overrides: str) -> Composed:
    return compose_config([*overrides, f"paths.runs={tmp_path / 'runs'}"])


def publish_planned(composed: Composed, name: str, kind: str, **notes: Any) -> str:
    """Publish an artifact under the key that the plan names, and return the key."""
    state = dict(forecast(Step("", composed)))[name]
    key = state.removeprefix("to run: ")
    final = composed.runs / "artifacts" / kind / key
    with staging(final) as work:
        (work / "made.txt").write_text(name)
        publish(work, final, Origin(kind, name, key, notes=notes))
    return key


@pytest.mark.parametrize(
    "overrides",
    [
        ("+exp=sft_qlora",),
        ("+exp=reward",),
        ("+exp=sft_qlora", "train=pretrain", "data=jsonl", "data.path=x", "data.text_key=text"),
    ],
    ids=["adapter", "scores", "texts"],
)
def test_the_plan_names_every_stage_in_order(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """A plan refuses a stage whose key does not cover the module that it runs."""
    planned = forecast(Step("", composed_in(tmp_path, *overrides)))
    assert [name for name, _ in planned] == CHAIN
    assert all(state.startswith("to run") for _, state in planned)


def test_finished_stages_are_recognised_by_their_keys(tmp_path: Path) -> None:
    composed = composed_in(tmp_path, "+exp=sft_qlora")
    assert dict(forecast(Step("", composed)))["train"] == "to run"  # its inputs have no digests yet
    base = publish_planned(composed, "prepare_base", handoff.BASE.kind)
    data = publish_planned(composed, "prepare_data", handoff.DATA.kind)
    planned = dict(forecast(Step("", composed)))
    assert planned["prepare_base"] == f"up to date: {base}"
    assert planned["prepare_data"] == f"up to date: {data}"
    assert planned["train"].startswith("to run: ")
    assert planned["gather"] == "to run"
    shards = publish_planned(composed, "train", handoff.TRAIN.kind)
    assert dict(forecast(Step("", composed)))["train"] == f"up to date: {shards}"
    for force, state in (
        ("train", "to run (forced)"), ("a.train", "to run (forced)"), ("b.train", "up to date"),
    ):  # fmt: skip
        forced = composed_in(tmp_path, "+exp=sft_qlora", f"force=[{force}]")
        assert dict(forecast(Step("a", forced)))["train"] == f"{state}: {shards}"
    other = composed_in(tmp_path, "+exp=sft_qlora", "train.lr=0.5")
    assert dict(forecast(Step("", other)))["train"].startswith("to run: ")
    assert dict(forecast(Step("", other)))["prepare_base"] == f"up to date: {base}"
    (composed.runs / "artifacts" / "base" / base / "manifest.json").unlink()
    assert dict(forecast(Step("", composed)))["prepare_base"].startswith("to run: ")


def test_the_limit_of_cut_rows_applies_to_a_reused_result(tmp_path: Path) -> None:
    """The limit is in no key: a change trains nothing again, and a tighter limit applies."""
    exp = ["+exp=sft_qlora", "train.max_len=99"]
    composed = composed_in(tmp_path, *exp, "data.max_truncated=0.5")
    publish_planned(composed, "prepare_base", handoff.BASE.kind)
    publish_planned(composed, "prepare_data", handoff.DATA.kind)
    counts = {"read": 10, "truncated": 3, "fits_99": 0, "fits_all": 200}
    key = publish_planned(
        composed, "train", handoff.TRAIN.kind, data={"train": counts, "heldout": {}}
    )
    assert dict(forecast(Step("", composed)))["train"] == f"up to date: {key}"
    looser = composed_in(tmp_path, *exp, "data.max_truncated=0.3")
    assert dict(forecast(Step("", looser)))["train"] == f"up to date: {key}"
    tighter = composed_in(tmp_path, *exp, "data.max_truncated=0.29")
    with pytest.raises(DataError, match="3 of 10"):
        forecast(Step("", tighter))
