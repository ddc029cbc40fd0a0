"""Real training with offload: two ranks, optimizer states and parameters in host memory.

On a CPU nothing moves, but the code is that of a GPU: DeepSpeed's CPUAdam, compiled at first use
(about two minutes, once per machine), and its partitioning.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.training.job import Peft, TrainJob, Zero
from tests.settings import Batch, Optim, Settings
from tests.training.places import Place, said, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PLAIN = Settings(
    peft=Peft("lora", rank=4, alpha=8),
    dtype="float32",
    optim=Optim(lr=5e-3, warmup_ratio=0.2, weight_decay=0.1, max_grad_norm=0.5),
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=4, max_len=64),
    save_steps=0,
    probes=3,
)
ADAM = {"offload_optimizer": "cpu"}
ZEROS = {
    "2": Zero(2),
    "2-adam": Zero(2, **ADAM),
    "3": Zero(3, persistence_threshold=0),
    "3-adam": Zero(3, persistence_threshold=0, **ADAM),
    "3-both": Zero(3, persistence_threshold=0, offload_param="cpu", **ADAM),
}
KINDS = {
    "lora32": PLAIN,
    "full16": replace(PLAIN, peft=Peft(), dtype="bfloat16"),
    "qlora": replace(PLAIN, peft=Peft("qlora", rank=4, alpha=8), dtype="bfloat16"),
}
CASES = {
    f"{kind}-{zero}": replace(settings, zero=how)
    for kind, settings in KINDS.items()
    for zero, how in ZEROS.items()
    if kind != "qlora" or how.stage == 2
}
OFFLOADED = [name for name in CASES if not name.endswith(("-2", "-3"))]


@pytest.fixture(scope="module")
def left(
    tmp_path_factory: pytest.TempPathFactory, base: Path, dataset: Path
) -> dict[str, TrainJob]:
    place = Place(tmp_path_factory.mktemp("offload"), base, dataset)
    jobs = {name: place.job(name, settings) for name, settings in CASES.items()}
    place.run(list(jobs.values()))
    return jobs


@pytest.mark.parametrize("name", OFFLOADED)
def test_offload_trains_the_same_weights(name: str, left: dict[str, TrainJob]) -> None:
    """Losses of all four steps agree to 1e-5 (relative) in fp32 and to 1e-3 in bf16."""
    without = name.rpartition("-")[0]
    expected, found = said(left[without])["losses"], said(left[name])["losses"]
    assert len(found) == 4
    assert found[-1] < found[0] - 0.1
    assert found == pytest.approx(expected, rel=1e-5 if name.startswith("lora32") else 1e-3)


@pytest.mark.parametrize("name", [name for name in OFFLOADED if name.startswith("lora32")])
def test_weights_agree_in_fp32(name: str, left: dict[str, TrainJob]) -> None:
    expected, found = weights(left[name.rpartition("-")[0]]), weights(left[name])
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=2e-5)
