"""LoRA pairs on fused experts in the layouts of peft 0.18, 0.19.0 and 0.19.1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.serving.reference.load import load_model
from tests.delivery.conftest import Done
from tests.weights.families.making import FAMILIES, FUSED, make_model, save_adapter
from tests.weights.making import save_tokenizer, state_of

Run = Callable[..., Done]
COUNT = 4  # experts
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a square gate_up_proj in each expert, and an adapter by the current peft."""
    root = tmp_path_factory.mktemp("moe")
    config = FAMILIES["qwen3_moe"].config(moe_intermediate_size=16, vocab_size=320)
    make_model(config).save_pretrained(root / "base")
    save_tokenizer(root / "base")
    targets = {"target_modules": ["q_proj"], "target_parameters": list(FUSED)}
    return root / "base", save_adapter(root / "adapter", root / "base", "qwen3_moe", **targets)


def rewritten(
    adapter: Path, folder: Path, version: str | None, older: tuple[str, ...] = ()
) -> Path:
    """Copy the adapter with another peft_version, and some pairs in the layout of peft 0.18.

    0.18: `delta[e, i, o] = sum_r A[e, r, i] B[o, r, e]`; today `delta[e, o, i]`, for the same
    parameter of shape (e, o, i). So each factor is the other one's transpose.
    """
    folder.mkdir()
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["peft_version"] = version
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = load_file(adapter / FILE)
    for a in [key for key in tensors if key.endswith(older) and ".lora_A." in key] if older else []:
        b = a.replace(".lora_A.", ".lora_B.")
        by_a = tensors[a].reshape(COUNT, -1, tensors[a].shape[1])
        by_b = tensors[b].reshape(tensors[b].shape[0], -1, COUNT)
        tensors[a] = torch.einsum("ore->ero", by_b).reshape(-1, by_b.shape[0]).contiguous()
        tensors[b] = torch.einsum("eri->ire", by_a).reshape(by_a.shape[2], -1).contiguous()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


BOTH = (".experts.lora_A.weight", ".experts.base_layer.lora_A.weight")
"""The wrappers nest: the first parameter's pair lies innermost."""


def delivered(here: Run, source: Path, base: Path, out: Path) -> dict[str, torch.Tensor]:
    here(f"source={source}", f"base={base}", "merge.base=original", f"out={out}")
    return state_of(out)


@pytest.mark.slow
def test_each_layout_is_read_by_its_version(
    here: Run, made: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = made
    today = delivered(here, adapter, base, tmp_path / "today")
    assert any("experts" in key for key in today)
    for version in ("0.18.1", "0.17.0", "0.19.0"):  # not is_transposed: 0.19.0 did as 0.18
        source = rewritten(adapter, tmp_path / f"a{version}", version, BOTH)
        older = delivered(here, source, base, tmp_path / version)
        assert all(torch.equal(tensor, today[key]) for key, tensor in older.items())


def test_a_square_parameter_needs_the_version(
    here: Run, made: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = made
    for version in (None, "0.18.2.dev0"):
        source = rewritten(adapter, tmp_path / str(version), version)
        done = here(f"source={source}", f"base={base}", "merge.base=original", code=2)
        assert "gate_up_proj: peft 0.18 and 0.19.1 lay out the factors" in done.output
        assert '"peft_version": "0.19.1"' in done.output


@pytest.mark.parametrize("version", ["0.18.1", "0.21.2"])
def test_the_reference_reads_it_the_same_way(
    made: tuple[Path, Path], version: str, tmp_path: Path
) -> None:
    base, adapter = made
    source = rewritten(adapter, tmp_path / "a", version, BOTH if version < "0.19" else ())
    ids = torch.tensor([[3, 5, 8, 13, 21]])
    with torch.no_grad():
        ours = load_model(base, adapter=source, dtype="float32")(ids).logits
        theirs = load_model(base, adapter=adapter, dtype="float32")(ids).logits
        plain = load_model(base, dtype="float32")(ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, plain, atol=1e-3)
