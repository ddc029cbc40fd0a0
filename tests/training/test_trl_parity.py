"""Losses against TRL's trainers: same tiny model, same tokens, fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.training.losses import Output, objective
from tasks.training.model.packed_model import accept_packed_rows
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Totals
from tasks.training.tokens.packing import Row, pack

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PAIRS = [
    {"prompt": f"say {word} ", "chosen": word * n, "rejected": other * m}
    for word, other, n, m in (("ab", "c", 2, 3), ("abc", "de", 1, 4), ("f", "gh", 5, 1))
]
TOLERANCE = 4e-6


def trainer_of(
    kind: str,
    folder: Path,
    rows: list[dict[str, Any]],
    model: Any,
    tokenizer: Any,
    other: Any = None,
    **config: Any,
) -> tuple[dict[str, Any], float]:
    """Return the first batch of a trainer of TRL, and its loss."""
    import trl
    from datasets import Dataset

    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(PAIRS),
        "remove_unused_columns": False,
        "dataset_num_proc": None,
        "seed": 0,
    }
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**usual, **config),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **({} if other is None else {"ref_model": other}),
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
    flat_ids, flat_bears, bounds = [], [], [0]
    for example in range(count):
        for role in range(len(roles)):
            number = role * count + example
            real = attention[number].bool()
            flat_ids.append(ids[number][real].numpy())
            flat_bears.append(bears[number][real].numpy())
            bounds.append(bounds[-1] + int(real.sum()))
    return Examples(
        roles=roles,
        names=tuple(str(i) for i in range(count)),
        ids=np.concatenate(flat_ids).astype(np.int32),
        bears=np.concatenate(flat_bears).astype(np.uint8),
        bounds=np.array(bounds),
        values={},
    )


def sums(model: Any, row: Row) -> torch.Tensor:
    with torch.no_grad():
        return row.sums(model(row=row))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": ["sigmoid"], "beta": 0.7}, {"beta": 0.7}),
        ({"loss_type": ["ipo"]}, {"kind": "ipo"}),
    ],
)
def test_dpo(
    theirs: dict[str, Any], ours: dict[str, Any], tmp_path: Path, model: Any, other: Any,
    tokenizer: Any,
) -> None:  # fmt: skip
    batch, wanted = trainer_of("DPO", tmp_path, PAIRS, model, tokenizer, other, **theirs)
    made = objective("dpo", ours)
    names = ("input_ids", "attention_mask", "completion_mask")
    examples = to_examples(*(batch[name] for name in names), made.roles)
    row = pack(examples, range(len(examples)))
    accept_packed_rows(model)
    accept_packed_rows(other)
    output = Output(logprobs=model(row=row), reference=sums(other, row))
    loss = made.loss(output, row, Totals.of(examples.supervised, examples.lengths)).value
    assert loss.item() == pytest.approx(wanted, rel=TOLERANCE)


def test_kto(tmp_path: Path, model: Any, other: Any, tokenizer: Any) -> None:
    rows = [
        {"prompt": p["prompt"], "completion": p["chosen"], "label": i != 1}
        for i, p in enumerate(PAIRS)
    ]
    config = {"beta": 0.3, "undesirable_weight": 1.2}
    batch, wanted = trainer_of("KTO", tmp_path, rows, model, tokenizer, other, **config)
    made = objective("kto", config)
    width = max(batch["input_ids"].shape[1], batch["KL_input_ids"].shape[1])

    def both(name: str) -> torch.Tensor:
        parts = (batch[name], batch[f"KL_{name}"])
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts])

    names = ("input_ids", "attention_mask", "completion_mask")
    examples = to_examples(*map(both, names), made.roles)
    desirable = np.array(batch["label"], np.float32)
    examples = dataclasses.replace(examples, values={"desirable": desirable})
    accept_packed_rows(model)
    accept_packed_rows(other)
    everything = range(len(examples))
    apart = pack(examples, everything, roles=[1])
    baseline = (sums(model, apart) - sums(other, apart)).mean()
    row = pack(examples, everything, roles=[0])
    output = Output(logprobs=model(row=row), reference=sums(other, row), baseline=baseline)
    loss = made.loss(output, row, Totals.of(examples.supervised, examples.lengths)).value
    assert loss.item() == pytest.approx(wanted, rel=TOLERANCE)


def test_reward(tmp_path: Path, base: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    model.score.weight.data.normal_(std=0.5)
    config = {"center_rewards_coefficient": 0.05, "disable_dropout": True}
    batch, wanted = trainer_of("Reward", tmp_path, PAIRS, model, tokenizer, **config)
    made = objective("reward", {"center": 0.05})
    mask = batch["attention_mask"]
    examples = to_examples(batch["input_ids"], mask, mask.clone(), made.roles)
    row = pack(examples, range(len(examples)))
    accept_packed_rows(model)
    loss = made.loss(
        Output(scores=model(row=row)), row, Totals.of(examples.supervised, examples.lengths)
    ).value
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_sft(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    rows = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS]
    batch, wanted = trainer_of("SFT", tmp_path, rows, model, tokenizer)
    made = objective("sft", {})
    examples = to_examples(
        batch["input_ids"], batch["attention_mask"], batch["labels"] != -100, made.roles
    )
    row = pack(examples, range(len(examples)))
    accept_packed_rows(model)
    loss = made.loss(
        Output(logprobs=model(row=row)), row, Totals.of(examples.supervised, examples.lengths)
    ).value
    assert loss.item() == pytest.approx(wanted, rel=TOLERANCE)


def means() -> tuple[torch.Tensor, torch.Tensor, Row]:
    """Return mean log-probabilities of three pairs, and a packed row for them."""
    draw = torch.Generator().manual_seed(0)
    chosen, rejected = -2 * torch.rand(2, 3, generator=draw) - 0.05
    ids = torch.arange(18).reshape(6, 3)
    bears = torch.tensor([0, 1, 1]).expand(6, 3)
    examples = to_examples(ids, torch.ones(6, 3), bears, ("chosen", "rejected"))
    return chosen, rejected, pack(examples, range(3))


def output_of(chosen: torch.Tensor, rejected: torch.Tensor) -> Output:
    """Return model output in which every token has the mean of its sequence."""
    by_sequence = torch.stack([chosen, rejected], dim=1).reshape(-1)
    return Output(logprobs=by_sequence.repeat_interleave(2))


def test_orpos_odds_ratio() -> None:
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected, row = means()
    theirs = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    losses = ORPOTrainer.odds_ratio_loss(theirs, chosen, rejected)[0]
    wanted = -chosen.mean() - losses.mean()  # TRL subtracts it from the cross-entropy
    loss = objective("orpo", {"beta": 0.4}).loss(
        output_of(chosen, rejected), row, Totals(3, (6, 6), 0)
    )
    assert loss.value.item() == pytest.approx(wanted.item(), rel=TOLERANCE)


def test_simpo() -> None:
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected, row = means()
    theirs = SimpleNamespace(
        beta=2.5,
        simpo_gamma=0.8,
        loss_type="simpo",
        label_smoothing=0.0,
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    wanted = CPOTrainer.cpo_loss(theirs, chosen, rejected)[0].mean()
    loss = objective("simpo", {"beta": 2.5, "gamma": 0.8}).loss(
        output_of(chosen, rejected), row, Totals(3, (6, 6), 0)
    )
    assert loss.value.item() == pytest.approx(wanted.item(), rel=TOLERANCE)
