"""Losses against TRL's trainers: same tiny model, same tokens, fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from tasks.training.losses import Output, objective
from tasks.training.model.packed_model import accept_packed_rows
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import Row, Totals, pack

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PAIRS = [
    {"prompt": f"say {word} ", "chosen": word * n, "rejected": other * m}
    for word, other, n, m in (("ab", "c", 2, 3), ("abc", "de", 1, 4), ("f", "gh", 5, 1))
]
COMPLETIONS = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS]
MASKS = ("input_ids", "attention_mask", "completion_mask")
TOLERANCE = 4e-6
USUAL = {
    "report_to": [], "use_cpu": True, "bf16": False, "fp16": False,
    "gradient_checkpointing": False, "per_device_train_batch_size": len(PAIRS),
    "remove_unused_columns": False, "dataset_num_proc": None, "seed": 0,
}  # fmt: skip


def theirs(
    kind: str,
    folder: Path,
    rows: list[dict[str, Any]],
    model: Any,
    tokenizer: Any,
    config: dict[str, Any],
    **models: Any,
) -> tuple[dict[str, Any], float]:
    """Return the first batch of a trainer of TRL, and its loss."""
    import trl
    from datasets import Dataset

    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(output_dir=str(folder), **USUAL, **config),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **models,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, float(trainer.compute_loss(trainer.model, dict(batch)))


@pytest.fixture
def model(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.fixture
def other(base: Path) -> Any:
    """A reference model that differs from the policy."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return made


def to_examples(
    ids: torch.Tensor, attention: torch.Tensor, bears: torch.Tensor, roles: tuple[str, ...]
) -> Examples:
    """Convert TRL's padded batch, all chosen before all rejected, to examples."""
    count = len(ids) // len(roles)
    numbers = [role * count + example for example in range(count) for role in range(len(roles))]
    real = [attention[number].bool() for number in numbers]
    marks = [bears[number][mask].numpy() for number, mask in zip(numbers, real, strict=True)]
    texts = [ids[number][mask].numpy() for number, mask in zip(numbers, real, strict=True)]
    made = Examples.of_texts(texts, np.concatenate(marks).astype(np.uint8))
    return dataclasses.replace(made, roles=roles, names=[str(i) for i in range(count)])


def require_same_loss(
    name: str, options: dict[str, Any], examples: Examples, model: Any, wanted: float, *,
    other: Any = None,
) -> None:  # fmt: skip
    """Compare our loss of the examples, in one row, with TRL's."""
    for each in (model, other):
        if each is not None:
            accept_packed_rows(each)
    made, everything = objective(name, options), range(len(examples))

    def sums(of: Any, row: Row) -> torch.Tensor:
        with torch.no_grad():
            return row.sums(of(row=row))

    row = pack(examples, everything, roles=made.trained)
    output = Output(logprobs=model(row=row))
    if made.head == "score":
        output = Output(scores=output.logprobs)
    if other is not None:
        output = output._replace(reference=sums(other, row))
    if made.baseline_role:
        apart = pack(examples, everything, roles=[1])
        output = output._replace(baseline=(sums(model, apart) - sums(other, apart)).mean())
    loss = made.loss(output, row, Totals.of(examples.supervised, examples.lengths)).value
    assert loss.item() == pytest.approx(wanted, rel=1e-5 if made.head == "score" else TOLERANCE)


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        ({"loss_type": ["sigmoid"], "beta": 0.7}, {"beta": 0.7}),
        ({"loss_type": ["ipo"]}, {"kind": "ipo"}),
    ],
)
def test_dpo(
    config: dict[str, Any], ours: dict[str, Any], tmp_path: Path, model: Any, other: Any,
    tokenizer: Any,
) -> None:  # fmt: skip
    batch, wanted = theirs("DPO", tmp_path, PAIRS, model, tokenizer, config, ref_model=other)
    examples = to_examples(*(batch[name] for name in MASKS), ("chosen", "rejected"))
    require_same_loss("dpo", ours, examples, model, wanted, other=other)


def test_kto(tmp_path: Path, model: Any, other: Any, tokenizer: Any) -> None:
    rows = [{**row, "label": i != 1} for i, row in enumerate(COMPLETIONS)]
    config = {"beta": 0.3, "undesirable_weight": 1.2}
    batch, wanted = theirs("KTO", tmp_path, rows, model, tokenizer, config, ref_model=other)
    width = max(batch["input_ids"].shape[1], batch["KL_input_ids"].shape[1])

    def both(name: str) -> torch.Tensor:
        parts = (batch[name], batch[f"KL_{name}"])
        return torch.cat([pad(x, (0, width - x.shape[1])) for x in parts])

    examples = to_examples(*map(both, MASKS), ("text", "mismatched"))
    desirable = np.array(batch["label"], np.float32)
    examples = dataclasses.replace(examples, values={"desirable": desirable})
    require_same_loss("kto", config, examples, model, wanted, other=other)


def test_reward(tmp_path: Path, base: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(std=0.5)
    config = {"center_rewards_coefficient": 0.05, "disable_dropout": True}
    batch, wanted = theirs("Reward", tmp_path, PAIRS, model, tokenizer, config)
    mask = batch["attention_mask"]
    examples = to_examples(batch["input_ids"], mask, mask.clone(), ("chosen", "rejected"))
    require_same_loss("reward", {"center": 0.05}, examples, model, wanted)


def test_sft(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    batch, wanted = theirs("SFT", tmp_path, COMPLETIONS, model, tokenizer, {})
    bears = batch["labels"] != -100
    examples = to_examples(batch["input_ids"], batch["attention_mask"], bears, ("text",))
    require_same_loss("sft", {}, examples, model, wanted)


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_losses_of_mean_log_probabilities(name: str) -> None:
    """Every token has the mean of its sequence."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    draw = torch.Generator().manual_seed(0)
    chosen, rejected = -2 * torch.rand(2, 3, generator=draw) - 0.05
    bears = torch.tensor([0, 1, 1]).expand(6, 3)
    ids = torch.arange(18).reshape(6, 3)
    row = pack(to_examples(ids, torch.ones(6, 3), bears, ("chosen", "rejected")), range(3))
    device = SimpleNamespace(device="cpu")
    if name == "orpo":
        options = {"beta": 0.4}
        trainer = SimpleNamespace(beta=0.4, accelerator=device)
        losses = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
        wanted = -chosen.mean() - losses.mean()  # TRL subtracts it from the cross-entropy
    else:
        options = {"beta": 2.5, "gamma": 0.8}
        trainer = SimpleNamespace(
            beta=2.5, simpo_gamma=0.8, loss_type="simpo", label_smoothing=0.0, alpha=0.0,
            accelerator=device,
        )  # fmt: skip
        wanted = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
    output = Output(torch.stack([chosen, rejected], dim=1).reshape(-1).repeat_interleave(2))
    loss = objective(name, options).loss(output, row, Totals(3, (6, 6), 0))
    assert loss.value.item() == pytest.approx(wanted.item(), rel=TOLERANCE)
