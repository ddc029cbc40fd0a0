"""Several adapters at once give the result of peft's merges one after another, rounded once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.cli.config import compose_config
from flows.delivery.run_delivery import direct, plan
from tasks.drift.fingerprint import Fingerprint, drift
from tasks.serving.reference.load import load_model
from tasks.serving.reference.measure import fingerprint
from tests.delivery.conftest import Done
from tests.delivery.test_deliver import same
from tests.weights.making import Spread, state_of, trained_model

Run = Callable[..., Done]
WEIGHTS = (0.7, -0.3)


@pytest.fixture(scope="module")
def second(place: Path, base: Path) -> Path:
    """An adapter with another rank, on some of the modules."""
    folder = place / "second"
    spread = Spread(rank=2, alpha=8, rslora=True, targets=["q_proj", "down_proj"])
    trained_model(base, spread, 5).save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, weighted: dict[Path, float]) -> dict[str, torch.Tensor]:
    """Return peft's merges in fp32, one after another, each with its scale, cast to bf16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for folder, weight in weighted.items():
        wrapped = PeftModel.from_pretrained(model, folder)
        for module in wrapped.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", weight)
        model = wrapped.merge_and_unload()
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def test_are_added_up_with_their_weights(
    either: Run, adapter: Path, second: Path, base: Path, tmp_path: Path
) -> None:
    given = f"adapters=[{adapter}:{WEIGHTS[0]},{second}:{WEIGHTS[1]}]"
    done = either(given, f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "merge", "convert"]
    assert f"adapter: 0.7 x {adapter}" in done.output
    assert f"adapter: -0.3 x {second}" in done.output
    wanted = merged_by_peft(base, dict(zip((adapter, second), WEIGHTS, strict=True)))
    assert same(state_of(tmp_path / "out"), wanted)
    merged = Path(done.summary["stages"][1]["artifact"])
    manifest = json.loads((merged / "manifest.json").read_text())
    assert manifest["config"]["weights"] == {"adapter": 0.7, "adapter_2": -0.3}
    assert set(manifest["inputs"]) == {"adapter", "adapter_2", "base"}
    assert manifest["notes"]["adapters"] == manifest["config"]["weights"]


def test_the_weights_are_part_of_the_key(
    here: Run, adapter: Path, second: Path, base: Path, tmp_path: Path
) -> None:
    def key(*adapters: str) -> str:
        done = here(
            f"adapters=[{','.join(adapters)}]", f"base={base}", "merge.base=original",
            f"out={tmp_path / 'out'}",
            "plan=true",
        )  # fmt: skip
        assert done.code == 0, done.output
        lines = done.output.splitlines()
        (line,) = (text for text in lines if text.startswith("  merge  "))
        return line

    keys = {
        key(f"{adapter}:0.7", f"{second}:0.3"),
        key(f"{adapter}:0.3", f"{second}:0.7"),
        key(f"{second}:0.3", f"{adapter}:0.7"),
        key(str(adapter), str(second)),
        key(f"{adapter}:0.7"),
        key(str(adapter)),
    }
    assert len(keys) == 6
    assert key(f"{adapter}:1.0", f"{second}:1e0") == key(str(adapter), str(second))


def test_one_adapter_with_a_weight(here: Run, adapter: Path, base: Path, tmp_path: Path) -> None:
    done = here(
        f"adapters=[{adapter}:0.5]",
        f"base={base}",
        "merge.base=original",
        f"out={tmp_path / 'out'}",
    )
    assert done.code == 0, done.output
    assert same(state_of(tmp_path / "out"), merged_by_peft(base, {adapter: 0.5}))


def test_adapters_that_cannot_be_added_up_are_refused(
    here: Run, adapter: Path, second: Path, base: Path, other: Path, tmp_path: Path
) -> None:
    def message(*arguments: str) -> str:
        done = here(*arguments, f"out={tmp_path / 'out'}")
        assert done.code == 2, done.output
        assert not (tmp_path / "runs").exists()
        return done.output

    full = message(f"adapters=[{adapter}:0.5,{base}:0.5]", f"base={base}")
    assert "a full Qwen2ForCausalLM" in full
    assert "given twice" in message(f"adapters=[{adapter}:0.5,{adapter}]", f"base={base}")
    assert "weight 0" in message(f"adapters=[{adapter}:0.0,{second}]", f"base={base}")
    assert "both given" in message(f"adapters=[{adapter}]", f"source={adapter}", f"base={base}")
    assert "source has to be given" in message(f"base={base}")
    assert "wrong base" in message(f"adapters=[{adapter},{second}]", f"base={other}")


def test_the_reference_holds_all_of_them_unmerged(adapter: Path, second: Path, base: Path) -> None:
    from tests.weights.making import PROBES

    weighted = dict(zip((adapter, second), WEIGHTS, strict=True))
    named = {str(folder): weight for folder, weight in weighted.items()}
    model = load_model(base, weighted=named, dtype="float32")
    merged = load_model(base, dtype="float32")
    merged.load_state_dict({k: v.float() for k, v in merged_by_peft(base, weighted).items()})
    ids = torch.tensor([PROBES[0]])
    with torch.no_grad():
        actual, wanted = (network(input_ids=ids).logits for network in (model, merged))
    # The merged weights were rounded to bf16, the unmerged ones were not.
    torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)
    plain = load_model(base, dtype="float32")
    with torch.no_grad():
        assert not torch.allclose(plain(input_ids=ids).logits, wanted, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_an_engine_compares_with_all_of_them_unmerged(
    adapter: Path, second: Path, base: Path, tmp_path: Path
) -> None:
    """Run the stages with a real reference child; tests with Prefect are in the long suite."""
    composed = compose_config(
        [
            f"adapters=[{adapter}:{WEIGHTS[0]},{second}:{WEIGHTS[1]}]", f"base={base}",
            "merge.base=original",
            f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}",
            "smoke.engine=transformers", "smoke.probes=4",
        ],
        config_name="deliver",
    )  # fmt: skip
    summary = direct(plan(composed), logging.getLogger("tests.deliver"), "several")
    stages = {stage["name"]: stage for stage in summary["stages"]}
    assert list(stages) == ["audit", "reference", "merge", "convert", "smoke_eval"]
    drifts = [stages[name]["drift"]["mean_kl"] for name in ("merge", "convert", "smoke_eval")]
    assert all(0 <= drift < 1e-3 for drift in drifts)
    # With the other sign of one weight it is another model, by more than rounding explains.
    wrong = load_model(base, weighted={str(adapter): -WEIGHTS[0], str(second): WEIGHTS[1]})
    before = Fingerprint.load(Path(stages["reference"]["artifact"]) / "fingerprint.fp")
    assert drift(before, fingerprint(wrong, before)).mean_kl > 5 * max(drifts)


@pytest.mark.slow
def test_the_literal_command_with_an_engine(
    deliver: Run, adapter: Path, second: Path, base: Path, tmp_path: Path
) -> None:
    done = deliver(
        f"adapters=[{adapter}:{WEIGHTS[0]},{second}:{WEIGHTS[1]}]", f"base={base}",
        "merge.base=original",
        f"out={tmp_path / 'out'}", "smoke.probes=4", engine="transformers",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert done.summary["stages"][-1]["drift"]["mean_kl"] < 1e-3
