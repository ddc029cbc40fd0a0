"""Advantages and losses compared with TRL's on the same numbers: value and gradient."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.rl import advantages
from tasks.rl.experience import Experience
from tasks.rl.losses import Totals
from tests.rl.test_losses import Case as OurCase

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = torch.tensor([5, 1, 8, 3, 6, 2])
MOST = int(LENGTHS.max())
MASK = (torch.arange(MOST) < LENGTHS[:, None]).long()
REAL = MASK.bool()
"""(S, L) mask of real tokens: TRL pads responses, ours lie end to end: `padded[REAL]`."""


def random_numbers(seed: int, *, scale: float = 1.0) -> torch.Tensor:
    """Random numbers, (S, L) float64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(MASK.shape, dtype=torch.float64, generator=generator)


Outcome = tuple[torch.Tensor, dict[str, float]]


@dataclass(frozen=True)
class Case:
    """The same loss in both projects; `theirs` are attributes of TRL's trainer."""

    ours: OurCase
    theirs: dict[str, Any]
    corrected: str | None = None


OLD = -random_numbers(1).abs()
NEW = OLD + random_numbers(2, scale=0.3)
REFERENCE = OLD + random_numbers(3, scale=0.4)
SAMPLED = OLD + random_numbers(4, scale=0.35)
ENTROPY = random_numbers(5).abs()
ADVANTAGES = random_numbers(6)[:, 0]

CASES = {
    "grpo with kl": Case(OurCase("token", "sequences", 0.2), {"loss_type": "grpo", "beta": 0.2}),
    "dr_grpo": Case(OurCase("token", "constant", 0.2), {"loss_type": "dr_grpo", "beta": 0.2}),
    "dapo": Case(
        OurCase(options={"clip_low": 0.1, "clip_high": 0.28}),
        {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.28},
    ),
    "two-sided": Case(OurCase(options={"dual_clip": 1.3}), {"loss_type": "bnpo", "delta": 1.3}),
    "gspo": Case(
        OurCase("sequence", "sequences", 0.0, {"clip_low": 0.03, "clip_high": 0.04}),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.03,
            "epsilon_high": 0.04,
        },
    ),
    "entropy": Case(
        OurCase(options={"entropy_coef": 0.3}), {"loss_type": "bnpo", "entropy_coef": 0.3}
    ),
    "tis": Case(OurCase(aggregate="sequences"), {"loss_type": "grpo"}, "token_truncate"),
    "icepop": Case(OurCase(), {"loss_type": "bnpo"}, "token_mask"),
    "sequence mask": Case(OurCase(), {"loss_type": "bnpo"}, "sequence_mask"),
}
KINDS = {"token_truncate": "tis", "token_mask": "icepop", "sequence_mask": "sequence_mask"}
HIGH, LOW = 1.6, 0.6


def their_weights(mode: str) -> torch.Tensor:
    """The ratio, as in `GRPOTrainer._generate_and_score_completions`."""
    gaps = (OLD - SAMPLED) * MASK
    if mode == "sequence_mask":
        gaps = gaps.sum(dim=1, keepdim=True)
    ratio = gaps.exp()
    if mode == "token_truncate":
        return ratio.clamp(max=HIGH)
    return ratio.masked_fill((ratio < LOW) | (ratio > HIGH), 0.0)


def their_loss(case: Case, new: torch.Tensor, entropy: torch.Tensor) -> Outcome:
    """Return TRL's loss and metrics."""
    from trl import GRPOTrainer

    accelerator = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
    )
    knobs = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": 0.0,
             "importance_sampling_level": "token"}  # fmt: skip
    knobs |= {name: value for name, value in case.theirs.items() if name != "delta"}
    trainer = SimpleNamespace(
        **knobs,
        args=SimpleNamespace(
            delta=case.theirs.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
        ),
        _entropy_bonus_enabled=bool(knobs["entropy_coef"]),
        use_adaptive_entropy=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=case.corrected is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MOST,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(MASK),
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum(),
    }
    if case.corrected is not None:
        inputs["importance_sampling_ratio"] = their_weights(case.corrected)
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss, {name: noted[-1] for name, noted in trainer._metrics["train"].items()}


def our_loss(case: Case, new: torch.Tensor, entropy: torch.Tensor) -> Outcome:
    """Return our loss and metrics."""
    experience = Experience(
        lengths=LENGTHS,
        groups=torch.zeros_like(LENGTHS),
        rewards=torch.zeros(len(LENGTHS)),
        truncated=torch.zeros(len(LENGTHS), dtype=torch.bool),
        sampled=SAMPLED[REAL],
        old=OLD[REAL],
        reference=REFERENCE[REAL],
        advantages=advantages.spread(ADVANTAGES, LENGTHS),
    )
    totals = Totals(int(LENGTHS.sum()), len(LENGTHS), MOST)
    more: dict[str, Any] = {"correction": KINDS[case.corrected]} if case.corrected else {}
    more |= {"correction_high": HIGH, "correction_low": LOW}
    loss = case.ours.loss(new[REAL], experience, entropy[REAL], totals, **more)
    return loss.value, {name: float(value) for name, value in loss.measures.items()}


def both(case: Case) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Return value, gradients (by log-probability and entropy) and metrics of theirs and ours."""
    numbers, measures = [], []
    for compute in (their_loss, our_loss):
        new, entropy = NEW.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
        value, noted = compute(case, new, entropy)
        value.backward()
        assert new.grad is not None
        moved = torch.zeros_like(ENTROPY) if entropy.grad is None else entropy.grad
        numbers.append(torch.cat([value.detach()[None], new.grad[REAL], moved[REAL]]))
        measures.append(noted)
    return numbers, measures


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_measures(name: str) -> None:
    case = CASES[name]
    (theirs, ours), (noted, measured) = both(case)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    same = {"entropy": "entropy"} | ({"kl": "kl"} if case.ours.kl_coef else {})
    if case.ours.ratio == "token":  # TRL counts responses here, since the ratio is one per response
        same |= {"clip_low_frac": "clip_ratio/low_mean", "clip_high_frac": "clip_ratio/high_mean"}
    for mine, its in same.items():
        assert measured[mine] == pytest.approx(noted[its], rel=1e-6), mine
