"""LLaMA-Factory's PPO: a model with `value_head.*` beside it, which vLLM would load as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.delivery.conftest import Done
from tests.delivery.dialects.saving import llamafactory_ppo
from tests.delivery.test_heads import SAME, head_artifact, same
from tests.weights.heads.making import causal, head_tensors
from tests.weights.making import state_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "one file": {},
    "shards and their index": {"shard": "40KB"},
    "pickles": {"pickled": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_is_kept_apart(here: Callable[..., Done], layout: str, tmp_path: Path) -> None:
    policy = causal("qwen")
    llamafactory_ppo(policy, tmp_path / "ppo", **LAYOUTS[layout])
    assert (layout == "shards and their index") == any(tmp_path.glob("ppo/*.index.json"))
    done = here(f"source={tmp_path / 'ppo'}", f"out={tmp_path / 'out'}", SAME)
    assert done.code == 0, done.output
    assert "a model with LLaMA-Factory's value head" in done.output
    assert done.stages == ["audit", "convert", "value_head"]
    actual, wanted = state_of(tmp_path / "out"), policy.state_dict()
    assert same(actual, {name: wanted[name] for name in actual})
    assert wanted.keys() - actual.keys() == {"lm_head.weight"}  # tied
    assert same(head_artifact(done, tmp_path), head_tensors())
    findings = done.summary["findings"]
    (stray,) = (finding for finding in findings if finding["code"] == "STRAY_WEIGHT_FILE")
    if layout == "shards and their index":  # of which vLLM takes those that the index lists
        assert stray["severity"] == "warning"
    else:
        assert stray["severity"] == "error"
        assert "an artifact of its own" in stray["handled"]
