"""Masks, batches and schedules: exact values, no process started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import ConfigError, DataError
from tasks.training.batches import IGNORE, Plan, collate, heldout_rounds
from tasks.training.chat import Counts, Problem, Sample, encode, read_rows, settle
from tasks.training.job import Batch, Settings, TrainJob
from tasks.training.model import load_tokenizer
from tasks.training.schedule import factor, warmup_steps


def chat(*turns: tuple[str, str], name: str = "x") -> dict[str, object]:
    return {"id": name, "messages": [{"role": r, "content": c} for r, c in turns]}


def encoded(row: dict[str, object], tokenizer, max_len: int = 100) -> Sample | Problem:
    ends = frozenset({tokenizer.eos_token_id})
    return encode(row, tokenizer, ends=ends, max_len=max_len)


def test_loss_falls_on_the_answer_and_its_end_only(tokenizer) -> None:
    sample = encoded(chat(("user", "hi"), ("assistant", "yo")), tokenizer)
    assert isinstance(sample, Sample)
    assert tokenizer.decode(sample.ids[: sample.prompt]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(sample.ids[sample.prompt :]) == "yo<|im_end|>"
    assert sample.supervised == 3


def test_only_the_last_answer_of_several_bears_loss(tokenizer) -> None:
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    sample = encoded(chat(*turns), tokenizer)
    assert isinstance(sample, Sample)
    assert tokenizer.decode(sample.ids[sample.prompt :]) == "d<|im_end|>"


def test_labels_are_the_supervised_ids_at_their_own_positions() -> None:
    batch = collate([Sample("a", (5, 6, 7), 1), Sample("b", (8, 9), 1)], pad_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[IGNORE, 6, 7], [IGNORE, 9, IGNORE]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.supervised == 3
    assert collate([Sample("a", (5, 6), 1)], pad_id=0).attention_mask is None


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% if add_generation_prompt %}A:{% endif %}{% for m in messages %}{{ m.content }}"
            "{% endfor %}<|im_end|>",
            "not prefix-stable",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            "does not end the turn",
        ),
    ],
)
def test_templates_that_hide_the_answer_are_refused_by_id(tokenizer, template, words) -> None:
    class Other:
        """The same tokenizer with another template."""

        def __call__(self, *args, **kwargs):
            return tokenizer(*args, **kwargs)

        def apply_chat_template(self, messages, **kwargs):
            return tokenizer.apply_chat_template(messages, chat_template=template, **kwargs)

    found = encode(
        chat(("user", "q"), ("assistant", "a"), name="s7"),
        Other(),
        ends=frozenset({tokenizer.eos_token_id}),
        max_len=100,
    )
    assert isinstance(found, Problem)
    assert words in found.text
    with pytest.raises(
        DataError, match=rf"train.jsonl: 1 samples cannot be used, first s7: .*{words}"
    ):
        settle([found], max_len=100, on_overlong="refuse", source="train.jsonl")


def test_overlong_rules() -> None:
    long, fits = Sample("long", tuple(range(12)), 5), Sample("fits", tuple(range(10)), 5)
    prompt = Problem("p", "prompt of 10 tokens leaves no room in 10", overlong=True)
    kept, counts, out = settle([long, fits], max_len=10, on_overlong="truncate", source="s")
    assert [len(s.ids) for s in kept] == [10, 10]
    assert (counts, out) == (Counts(2, 2, 1, 0), [])
    kept, counts, out = settle([long, fits, prompt], max_len=10, on_overlong="refuse", source="s")
    assert [s.id for s in kept] == ["fits"]
    assert counts == Counts(3, 1, 0, 2)
    assert [p.id for p in out] == ["long", "p"]
    with pytest.raises(DataError, match=r"first p: prompt of 10 tokens") as caught:
        settle([long, prompt], max_len=10, on_overlong="truncate", source="s")
    assert caught.value.details == ("p: prompt of 10 tokens leaves no room in 10",)
    with pytest.raises(DataError, match=r"no sample is left of 1"):
        settle([prompt], max_len=10, on_overlong="refuse", source="s")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"id": "a"}) + "\n{oops\n")
    with pytest.raises(DataError, match=r"train.jsonl:2: not JSON"):
        read_rows(path)


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=40),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_every_sample_is_seen_once_an_epoch(lengths, micro, accumulation, world, seed) -> None:
    samples = [Sample(str(i), tuple(range(n)), 1) for i, n in enumerate(lengths)]
    batch = Batch(micro, micro * accumulation * world, epochs=2)
    plan = Plan(samples, batch, seed=seed, world_size=world)
    seen: list[int] = []
    for step in range(1, plan.steps + 1):
        parts = [plan.step(step, rank) for rank in range(world)]
        indices = [i for part in parts for chunk in part.micro for i in chunk]
        assert len(indices) == batch.global_batch_size
        assert {part.supervised for part in parts} == {sum(lengths[i] - 1 for i in indices)}
        assert {part.tokens for part in parts} == {sum(lengths[i] for i in indices)}
        seen += indices
    counts = [seen.count(i) for i in range(len(samples))]
    assert min(counts) >= 2
    assert sum(counts) == plan.steps * batch.global_batch_size


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    samples = [Sample(str(i), tuple(range(2 + i % 7)), 1) for i in range(50)]
    batch = Batch(2, 8, max_steps=9)
    together = []
    for world in (1, 2, 4):
        plan = Plan(samples, batch, seed=3, world_size=world)
        together.append(
            [
                sorted(i for r in range(world) for c in plan.step(s, r).micro for i in c)
                for s in range(1, 10)
            ]
        )
    assert together[0] == together[1] == together[2]


@given(count=st.integers(1, 30), size=st.integers(1, 8), world=st.integers(1, 4))
def test_heldout_rounds_cover_once_and_keep_ranks_in_step(count, size, world) -> None:
    samples = [Sample(str(i), (1, 2), 1) for i in range(count)]
    rounds = [
        heldout_rounds(samples, size=size, world_size=world, rank=rank) for rank in range(world)
    ]
    assert len({len(r) for r in rounds}) == 1
    assert sorted(i for r in rounds for c in r for i in c or ()) == list(range(count))


def test_schedules_by_value() -> None:
    assert warmup_steps(120, 0.03) == 4
    assert warmup_steps(120, 0.0) == 0
    at = {
        k: [factor(k, step=s, total=4, warmup=2) for s in (1, 2, 3, 4)]
        for k in ("constant", "linear")
    }
    assert at["constant"] == [0.5, 1.0, 1.0, 1.0]
    assert at["linear"] == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3])
    cosine = [factor("cosine", step=s, total=4, warmup=2) for s in (1, 2, 3, 4)]
    assert cosine == pytest.approx([0.5, 1.0, 0.75, 0.25])
    with pytest.raises(ConfigError, match=r"train.scheduler=step"):
        factor("step", step=1, total=4, warmup=2)


def test_the_loss_is_the_cross_entropy_of_supervised_tokens(base: Path) -> None:
    """Against a sum written out in float64."""
    from transformers import AutoModelForCausalLM

    from tasks.training.objectives import objective

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    samples = [Sample("a", (70, 71, 72, 73), 2), Sample("b", (80, 81), 1)]
    with torch.no_grad():
        found = objective("sft").loss_sum(model, collate(samples, pad_id=0))
        wanted = 0.0
        for sample in samples:
            logits = model(torch.tensor([sample.ids])).logits[0].double()
            logprobs = torch.log_softmax(logits, dim=-1)
            for t in range(sample.prompt, len(sample.ids)):
                wanted -= float(logprobs[t - 1, sample.ids[t]])
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ConfigError, match=r"train.objective=dpp"):
        objective("dpp")


def test_the_datas_own_chat_template_is_the_one_trained_with(base: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    job = TrainJob(Settings(), base, "", tmp_path, tmp_path / "out", tmp_path / "checkpoints")
    bases_own = load_tokenizer(job).chat_template
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(job)
    assert bases_own != tokenizer.chat_template == template
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == template
