"""LoRA, DoRA, PiSSA and QLoRA with two ranks: the same under every stage, and saved completely."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tasks.drift.fingerprint import EXACT, Fingerprint, drift, within
from tests.training.model.adapter_jobs import ADAPTED, Adapted
from tests.training.model.jobs import load_trained


@pytest.mark.parametrize(
    "name",
    ["dora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pissa", "patterns"))],
)
def test_zero3_trains_what_zero2_trains(adapted: Adapted, name: str) -> None:
    """Adapters begin with the same values, and DoRA has its base weight under ZeRO-3."""
    two, three = adapted[f"{name}_zero2"], adapted[f"{name}_zero3"]
    assert two.losses == pytest.approx(three.losses, abs=2e-3)
    assert two.losses[-1] < two.losses[0] - 0.1
    start = two.stitched("start")
    assert {n: t.shape for n, t in start.items()} == {
        n: t.shape for n, t in three.stitched("start").items()
    }
    assert all(torch.equal(t, start[n]) for n, t in three.stitched("start").items())


@pytest.mark.parametrize("name", ADAPTED)
def test_the_files_are_the_model_that_was_trained(adapted: Adapted, name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = load_trained(adapted[name], AutoModelForCausalLM)
    reference = Fingerprint.load(adapted[name].out / "print")
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = [model(torch.tensor([p])).logits[0, :-1].float() for p in reference.probes]
    logprobs = torch.log_softmax(torch.cat(rows), dim=-1)
    found = replace(
        reference,
        logprobs=logprobs.gather(1, torch.from_numpy(reference.ids).long()).numpy(),
        top1=logprobs.argmax(-1).int().numpy(),
    )
    assert reference.noise is not None
    assert within(drift(reference, found), EXACT, noise=reference.noise) == []


def test_patterns_and_modules_to_save(adapted: Adapted) -> None:
    full = adapted["patterns_zero3"].stitched()
    ranks = {name: tensor.shape[0] for name, tensor in full.items() if ".lora_A." in name}
    assert len(ranks) == 2 * 6  # of seven linear maps one is excluded
    assert not any("down_proj" in name for name in ranks)
    for name, rank in ranks.items():
        assert rank == (2 if "q_proj" in name else 6 if "layers.1.mlp.up_proj" in name else 4)
    (saved,) = [name for name in full if "modules_to_save" in name]
    assert saved == "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    said = adapted["patterns_zero3"].json("adapter_config.json")
    assert said["modules_to_save"] == ["embed_tokens"]
    assert said["alpha_pattern"] == {"q_proj": 32.0}


@pytest.mark.slow
def test_a_4_bit_model_is_neither_moved_nor_cast(adapted: Adapted) -> None:
    """`.to` is not supported for `4-bit`: in these jobs any such call raises."""
    run = adapted["fp4_pissa"]
    assert run.losses[-1] < run.losses[0] - 0.1
    assert len(run.stitched()) == 2 * 14


@pytest.mark.slow  # test_fused_lora.py compares both without ranks
def test_the_fused_layer_trains_what_pefts_own_does(adapted: Adapted) -> None:
    """Two ranks through DeepSpeed in fp32: losses and gathered adapters agree to 1e-5.

    Under ZeRO-3 peft's own forward pass is used, since weights are gathered around modules.
    """
    fused, own = adapted["fp32_zero2"], adapted["fp32_zero3"]
    assert (fused.json("fused.json"), own.json("fused.json")) == (14, 0)
    assert fused.losses == pytest.approx(own.losses, abs=1e-5)
    assert fused.losses[-1] < fused.losses[0] - 0.1
    expected, found = (one.stitched(dtype=torch.float32) for one in (own, fused))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5)
