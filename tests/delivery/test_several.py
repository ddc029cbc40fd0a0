"""Several adapters at once give the result of peft's merges one after another, rounded once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.delivery.conftest import Done
from tests.delivery.making import Tensors, differing
from tests.weights.families.making import merged_by_peft
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


def _merged(base: Path, weighted: dict[Path, float]) -> Tensors:
    return dict(merged_by_peft(base, *weighted.items()).state_dict())


def test_are_added_up_with_their_weights(
    here: Run, adapter: Path, second: Path, base: Path, tmp_path: Path
) -> None:
    weighted = dict(zip((adapter, second), WEIGHTS, strict=True))
    words = ",".join(f"{folder}:{weight}" for folder, weight in weighted.items())
    done = here(f"adapters=[{words}]", f"base={base}", BASE)
    assert done.stages == ["audit", "merge", "convert"]
    assert differing(state_of(tmp_path / "out"), _merged(base, weighted)) == []
    manifest = json.loads(Path(done.summary["stages"][1]["artifact"], "manifest.json").read_text())
    named = dict(zip(("adapter", "adapter_2"), WEIGHTS, strict=True))
    assert manifest["notes"]["adapters"] == manifest["config"]["weights"] == named
    assert set(manifest["inputs"]) == {*named, "base"}


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
    merged.load_state_dict({k: v.float() for k, v in _merged(base, weighted).items()})
    ids = torch.tensor([PROBES[0]])
    with torch.no_grad():
        actual, wanted, before = (each(input_ids=ids).logits for each in (model, merged, plain))
    # The merged weights were rounded to bf16, the unmerged ones were not.
    torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)
    assert not torch.allclose(before, wanted, rtol=0.05, atol=0.05)
