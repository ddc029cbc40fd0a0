"""Several adapters at once give the result of peft's merges one after another, rounded once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.delivery.conftest import Done
from tests.delivery.making import Tensors, differing, with_rows
from tests.weights.making import Spread, state_of, trained_model

Run = Callable[..., Done]
BASE = "merge.base=original"
WEIGHTS = (0.7, -0.3)


@pytest.fixture(scope="module")
def second(place: Path, base: Path) -> Path:
    """An adapter with another rank, on some of the modules."""
    spread = Spread(rank=2, alpha=8, rslora=True, targets=["q_proj", "down_proj"])
    trained_model(base, spread, 5).save_pretrained(place / "second")
    return place / "second"


def merged_by_peft(base: Path, weighted: dict[Path, float]) -> Tensors:
    """Return peft's merges in fp32, one after another, each with its scale, cast to bf16."""
    from peft import PeftModel

    model: Any = with_rows(base)
    for folder, weight in weighted.items():
        wrapped = PeftModel.from_pretrained(model, folder)
        for module in wrapped.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", weight)
        model = wrapped.merge_and_unload()
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_are_added_up_with_their_weights(
    here: Run, adapter: Path, second: Path, base: Path, count: int, tmp_path: Path
) -> None:
    weighted = dict(list(zip((adapter, second), WEIGHTS, strict=True))[:count])
    words = ",".join(f"{folder}:{weight}" for folder, weight in weighted.items())
    done = here(f"adapters=[{words}]", f"base={base}", BASE)
    assert done.stages == ["audit", "merge", "convert"]
    assert differing(state_of(tmp_path / "out"), merged_by_peft(base, weighted)) == []
    manifest = json.loads(Path(done.summary["stages"][1]["artifact"], "manifest.json").read_text())
    named = dict(list({"adapter": 0.7, "adapter_2": -0.3}.items())[:count])
    assert manifest["notes"]["adapters"] == manifest["config"]["weights"] == named
    assert set(manifest["inputs"]) == {*named, "base"}


@pytest.mark.slow
def test_the_weights_are_part_of_the_key(
    here: Run, adapter: Path, second: Path, base: Path
) -> None:
    def key(*adapters: str) -> str:
        done = here(f"adapters=[{','.join(adapters)}]", f"base={base}", BASE, "plan=true")
        (line,) = (text for text in done.output.splitlines() if text.startswith("  merge  "))
        return line

    keys = {
        key(f"{adapter}:0.7", f"{second}:0.3"),
        key(f"{adapter}:0.3", f"{second}:0.7"),
        key(f"{second}:0.3", f"{adapter}:0.7"),
        key(str(adapter), str(second)),
    }
    assert len(keys) == 4
    assert key(f"{adapter}:1.0", f"{second}:1e0") == key(str(adapter), str(second))


def test_adapters_that_cannot_be_added_up_are_refused(
    here: Run, adapter: Path, second: Path, base: Path, other: Path
) -> None:
    words = f"base={base}"
    full = here(f"adapters=[{adapter}:0.5,{base}:0.5]", words, code=2)
    assert "a full Qwen2ForCausalLM" in full.output
    here(f"adapters=[{adapter}:0.5,{adapter}]", words, code=2)
    assert "weight 0" in here(f"adapters=[{adapter}:0.0,{second}]", words, code=2).output
    here(f"adapters=[{adapter}]", f"source={adapter}", words, code=2)
    here(words, code=2)
    refused = here(f"adapters=[{adapter},{second}]", f"base={other}", code=2)
    assert "wrong base" in refused.output


def test_the_reference_holds_all_of_them_unmerged(adapter: Path, second: Path, base: Path) -> None:
    from tasks.serving.reference.load import load_model
    from tests.weights.making import PROBES

    weighted = dict(zip((adapter, second), WEIGHTS, strict=True))
    named = {str(folder): weight for folder, weight in weighted.items()}
    model = load_model(base, weighted=named, dtype="float32")
    merged, plain = (load_model(base, dtype="float32") for _ in range(2))
    merged.load_state_dict({k: v.float() for k, v in merged_by_peft(base, weighted).items()})
    ids = torch.tensor([PROBES[0]])
    with torch.no_grad():
        actual, wanted, before = (each(input_ids=ids).logits for each in (model, merged, plain))
    # The merged weights were rounded to bf16, the unmerged ones were not.
    torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)
    assert not torch.allclose(before, wanted, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_an_engine_compares_with_all_of_them_unmerged(
    adapter: Path, second: Path, base: Path, tmp_path: Path
) -> None:
    """Run the stages with a real reference child; with one sign changed it is another model."""
    from flows.cli.config import compose_config
    from flows.delivery.run_delivery import direct, plan
    from tasks.drift.fingerprint import Fingerprint, drift
    from tasks.serving.reference.load import load_model
    from tasks.serving.reference.measure import fingerprint

    words = [
        f"adapters=[{adapter}:{WEIGHTS[0]},{second}:{WEIGHTS[1]}]", f"base={base}", BASE,
        f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}",
        "smoke.engine=transformers", "smoke.probes=4",
    ]  # fmt: skip
    composed = compose_config(words, config_name="deliver")
    summary = direct(plan(composed), logging.getLogger("tests.deliver"), "several")
    stages = {stage["name"]: stage for stage in summary["stages"]}
    drifts = [stages[name]["drift"]["mean_kl"] for name in ("merge", "convert", "smoke_eval")]
    assert all(0 <= drift < 1e-3 for drift in drifts)
    wrong = load_model(base, weighted={str(adapter): -WEIGHTS[0], str(second): WEIGHTS[1]})
    before = Fingerprint.load(Path(stages["reference"]["artifact"]) / "fingerprint.fp")
    assert drift(before, fingerprint(wrong, before)).mean_kl > 5 * max(drifts)
