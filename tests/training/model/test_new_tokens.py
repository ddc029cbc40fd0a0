"""New tokens of the base: their embedding rows, and no others, are trained beside an adapter."""

from __future__ import annotations

import pytest

from tests.training.model.adapter_jobs import Adapted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows_zero2", "rows_zero3"])
def test_rows_of_new_tokens_are_trained(adapted: Adapted, name: str) -> None:
    """peft needs CUDA here under ZeRO-3."""
    run = adapted[name]
    assert run.losses[-1] < run.losses[0] - 0.1
    said = run.json("adapter_config.json")
    assert said["trainable_token_indices"] == {"model.embed_tokens": [259, 260]}
    (name,) = [n for n in run.stitched() if "trainable_tokens" in n]
    before, after = run.stitched("start")[name], run.stitched()[name]
    assert after.shape == (2, 64)
    assert (before != after).any(dim=1).all()
    assert run.json("config.json")["vocab_size"] == 264


@pytest.mark.slow
def test_every_stage_trains_rows_the_same(adapted: Adapted) -> None:
    two, three, full = (adapted[f"rows_{kind}"] for kind in ("zero2", "zero3", "full_zero3"))
    assert three.losses == pytest.approx(two.losses, abs=2e-3)
    assert three.losses[0] == pytest.approx(full.losses[0], abs=2e-3)
    assert full.stitched()["model.embed_tokens.weight"].shape == (264, 64)


def test_rows_of_new_tokens_in_both_tables_of_an_untied_model(adapted: Adapted) -> None:
    run = adapted["rows_untied_zero3"]
    said = run.json("adapter_config.json")
    assert said["trainable_token_indices"] == {
        "model.embed_tokens": [259, 260],
        "lm_head": [259, 260],
    }
    before, after = run.stitched("start"), run.stitched()
    moved = {
        name.partition(".token_adapter")[0].rpartition(".")[2]: (before[name] != after[name])
        for name in after
        if "trainable_tokens" in name
    }
    # No text has "<tool>": what it is read as is not learnt, that it is not said is.
    assert {name: rows.any(dim=1).tolist() for name, rows in moved.items()} == {
        "embed_tokens": [True, False],
        "lm_head": [True, True],
    }
