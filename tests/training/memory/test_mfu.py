"""Model FLOPs utilisation: formulas by hand; only for devices with a known peak."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tasks.training.job import Peft, TrainJob
from tasks.training.memory.mfu import Meter, meter, peak_of, step_flops
from tasks.training.memory.sizes import Sizes
from tasks.training.tokens.order import Counts
from tests.settings import Settings

SMALL = Sizes(
    hidden=4, intermediate=6, layers=2, vocab=10, heads=2, kv_heads=1, head_dim=2, tied=True
)
LINEAR = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6)
"""q and o, k and v, the three of the MLP; of two layers."""
COUNTS = Counts(examples=2, supervised=(5,), tokens=8, squares=3**2 + 5**2)
ATTENTION = 12 * 2 * 4 * (3**2 + 5**2)


def test_full_training_costs_six_flops_per_weight() -> None:
    by_hand = 6 * LINEAR * 8 + 6 * 4 * 10 * 5 + ATTENTION
    assert step_flops(SMALL, Settings(), COUNTS) == by_hand
    reward = Settings(objective="reward")
    assert step_flops(SMALL, reward, COUNTS) == 6 * LINEAR * 8 + ATTENTION


def test_frozen_weights_cost_four_flops() -> None:
    pairs = 2 * 3 * (4 + 4 + 4 + 2 + 4 + 2 + 4 + 4 + 3 * (4 + 6))
    lora = Settings(peft=Peft("lora", rank=3))
    by_hand = (4 * LINEAR + 6 * pairs) * 8 + 4 * 4 * 10 * 5 + ATTENTION
    assert step_flops(SMALL, lora, COUNTS) == by_hand
    head = Settings(peft=Peft("lora", rank=3, modules_to_save=("lm_head",)))
    assert step_flops(SMALL, head, COUNTS) == by_hand + 2 * 4 * 10 * 5


def test_palms_formula_for_one_long_sequence() -> None:
    """6 N + 12 L H Q T per token, with every token supervised and N without the embedding."""
    counts = Counts(1, (512,), 512, 512**2)
    palm = 6 * (LINEAR + 40) + 12 * 2 * 2 * 2 * 512
    assert step_flops(SMALL, Settings(), counts) == 512 * palm


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A400", None),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(device: str, peak: float | None) -> None:
    assert peak_of(device, "bfloat16") == peak_of(device, "float16") == peak
    assert peak_of(device, "float32") is None


def test_mfu_is_the_share_of_the_peak() -> None:
    flops = step_flops(SMALL, Settings(), COUNTS)
    assert Meter(SMALL, Settings(), peak=4 * flops).mfu(COUNTS, 0.5) == 0.5


def test_there_is_no_mfu_on_a_cpu(tmp_path) -> None:
    job = TrainJob(Settings(), *[tmp_path, "d", tmp_path, tmp_path, tmp_path])
    assert meter(job, SimpleNamespace(device=torch.device("cpu"), world_size=1)) is None
