"""PiSSA's initialisation: the adapter begins with the base's principal components."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.model.adapter_jobs import Adapted


@pytest.mark.parametrize(
    "name", [pytest.param("pissa_zero2", marks=pytest.mark.slow), "pissa_zero3"]
)
def test_pissa_begins_with_the_bases_principal_components(
    adapted: Adapted, base: Path, name: str
) -> None:
    """Meng et al. 2024, eq. 2 and 3; the subtracted half does not change."""
    assert adapted[name].losses[0] == pytest.approx(adapted["lora_zero2"].losses[0], abs=1e-4)
    said = adapted[name].json("adapter_config.json")
    assert (said["r"], said["lora_alpha"], said["init_lora_weights"]) == (8, 16, True)
    start, end = adapted[name].stitched("start"), adapted[name].stitched()
    weights = load_file(base / "model.safetensors")
    for key in (k for k in start if ".lora_A." in k):
        other = key.replace("lora_A", "lora_B")
        module = key.removeprefix("base_model.model.").partition(".lora_A")[0]
        u, s, vt = torch.linalg.svd(weights[f"{module}.weight"].double())
        best = u[:, :4] * s[:4] @ vt[:4]
        a, b = start[key].double(), start[other].double()
        assert (2 * b[:, :4] @ a[:4] - best).norm() < 0.01 * best.norm()  # scale is alpha / rank
        assert torch.equal(a[:4], a[4:])
        assert torch.equal(b[:, :4], -b[:, 4:])
        assert torch.equal(end[key][4:], start[key][4:])
        assert torch.equal(end[other][:, 4:], start[other][:, 4:])
        assert not torch.equal(end[key][:4], start[key][:4])
