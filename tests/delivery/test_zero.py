"""Real DeepSpeed checkpoints of two ranks, compared with DeepSpeed's own converter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands import run_ranks
from tests.delivery.conftest import Done
from tests.weights.making import save_tokenizer, state_of

Run = Callable[..., Done]
pytestmark = pytest.mark.slow  # a launch of two ranks


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with all cases, and `base`."""
    root = tmp_path_factory.mktemp("zero") / "saved"
    log_path = root.with_suffix(".log")
    run_ranks("tests.delivery.save_zero", str(root), log_path=log_path, TORCHDYNAMO_DISABLE="1")
    save_tokenizer(root / "base")
    return root


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors as DeepSpeed's converter reads them, in fp32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return {n: t.clone() for n, t in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_is_delivered_as_deepspeed_reads_it(
    here: Run, zero: Path, kind: str, tmp_path: Path
) -> None:
    merge = ["merge.base=original"] if kind == "lora" else []
    done = here(f"source={zero / kind}", f"base={zero / 'base'}", *merge)
    assert done.stages == ["audit", "gather", *(["merge"] if merge else []), "convert"]
    actual, base, wanted = state_of(tmp_path / "out"), state_of(zero / "base"), whole(zero / kind)
    assert set(actual) == set(base)
    for name, tensor in actual.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = wanted[name] if kind == "full" else base[name].float()
        if f"{module}.lora_A.default.weight" in wanted:
            a, b = (wanted[f"{module}.lora_{half}.default.weight"] for half in "AB")
            expected = expected + (b @ a) * 2.0
        assert torch.equal(tensor, expected.bfloat16()), name


def test_an_adapter_without_its_settings_is_refused(here: Run, zero: Path, tmp_path: Path) -> None:
    shutil.copytree(zero / "lora", tmp_path / "lora")
    settings = tmp_path / "lora" / "adapter_config.json"
    hidden = settings.rename(tmp_path / "adapter_config.json")
    words = [f"source={tmp_path / 'lora' / 'global_step1'}", f"base={zero / 'base'}", "plan=true"]
    assert "adapter_config.json" in here(*words, code=2).output
    words.append(f"adapter_config={hidden}")
    assert "merge.base=" in here(*words, code=2).output
    here(*words, "merge.base=original")


def test_a_missing_rank_is_named(here: Run, zero: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(zero / "full", tmp_path / "full"))
    (states,) = source.rglob("*zero_pp_rank_1*optim_states.pt")
    states.unlink()
    done = here(f"source={source}", f"base={zero / 'base'}", "plan=true", code=2)
    assert "absent: 1" in done.output
