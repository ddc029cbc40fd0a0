"""Vision-language bases, trained on text and delivered whole: what no text passes is the base's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.toy.pretrain import train_tokenizer
from tasks.toy.splits import corpus, write_dataset
from tests.e2e.conftest import Run
from tests.e2e.test_chain import tensors_of
from tests.vision import FAMILIES, PROCESSOR, save_base

pytestmark = pytest.mark.slow
QUICK = (
    "model=hf", "train.max_len=256", "train.global_batch_size=16", "smoke=transformers",
    "smoke.max_new_tokens=16", "smoke.eval_samples=8", "smoke.min_stop_rate=0",
    "smoke.max_degenerate_rate=1",
)  # fmt: skip
TOWERS = ("vision_", "visual.", "projector", "embed_vision")


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        talk = [text for pair in corpus(400, seed=1) for text in pair]
        folder = tmp_path_factory.mktemp(family)
        return save_base(family, folder / "base", train_tokenizer(talk, context=512))

    return make


def require_whole(base: Path, served: Path) -> None:
    """Assert that the served model is the base's file, with a trained language tower."""
    before, after = tensors_of(base), tensors_of(served)
    assert set(after) == set(before)
    changed = [name for name, tensor in before.items() if not tensor.equal(after[name])]
    assert changed
    assert [name for name in changed if any(tower in name for tower in TOWERS)] == []
    assert (served / PROCESSOR).read_bytes() == (base / PROCESSOR).read_bytes()


@pytest.mark.parametrize("tuning", ["lora", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_is_delivered_with_a_trained_language_tower(
    family: str,
    tuning: str,
    base_of: Callable[[str], Path],
    rlhf: Callable[..., Run],
    tmp_path: Path,
) -> None:
    base = base_of(family)
    write_dataset(tmp_path, {"train": 200, "heldout": 8}, seed=0)
    done = rlhf(
        tmp_path / "runs", "+exp=sft_qlora", f"peft={tuning}", f"model.path={base}", *QUICK,
        f"data.path={tmp_path}/train.jsonl", "train.max_steps=4",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    assert done.stage("smoke_eval")["handoff"]["value"] < 1e-4
    require_whole(base, done.artifact("convert"))


@pytest.mark.parametrize("family", FAMILIES)
def test_preferences_train_the_language_tower(
    family: str, base_of: Callable[[str], Path], rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    base = base_of(family)
    done = rlhf(
        tmp_path / "runs", "+exp=dpo", "peft=lora", f"model.path={base}", *QUICK,
        "train.max_steps=3", "train.lr=1e-4",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stage("smoke_eval")["handoff"]["value"] < 1e-4
    require_whole(base, done.artifact("convert"))
