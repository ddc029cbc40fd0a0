"""Two real ranks: the files are the trained model, however ranks share the work."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import EXACT, Fingerprint, ScorePrint, drift, score_drift
from tasks.training.engine.checkpoint import complete
from tasks.training.job import Peft, TrainJob
from tests.settings import Settings
from tests.training.jobs import (
    CUT_AT,
    DEFAULT,
    OBJECTIVES,
    REWARDS,
    SHARED,
    STAGES,
    Trained,
    shared,
)
from tests.training.places import (
    losses,
    read_json,
    require_same_weights,
    results,
    run_train,
    start_weights,
    weights,
)


def default_or_slow(*names: str) -> list[Any]:
    return [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in names]


# The slow launch trains all of its jobs before the first test that reads one.
pytestmark = pytest.mark.timeout(2400)
OF_TOKENS = default_or_slow(*(n for n in STAGES if not n.startswith("fp32_")))
OF_SCORES = default_or_slow(*REWARDS)


def load_trained(job: TrainJob, auto: Any, **extra: Any) -> Any:
    """Load the trained model with peft and transformers, without code that trained it."""
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    from tasks.weights.quantized.nf4 import keep_as_loaded

    peft = job.settings.peft
    if peft.kind == "qlora":
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=peft.quant_type,
            bnb_4bit_use_double_quant=peft.double_quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = auto.from_pretrained(job.base, dtype=torch.bfloat16, **extra)
    if peft.kind != "none":
        document = read_json(job.out / "adapter_config.json")
        unknown = {"peft_type", "peft_version", "auto_mapping", "inference_mode"}
        config = LoraConfig(**{k: v for k, v in document.items() if k not in unknown})
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.set_num_threads(1)
    parameters = dict(model.named_parameters())
    for name, tensor in weights(job).items():
        assert parameters[name].shape == tensor.shape
        parameters[name].data = tensor.bfloat16()
    return keep_as_loaded(model).eval()


@pytest.mark.parametrize("name", OF_TOKENS)
def test_the_files_are_the_model_that_was_trained(trained: Trained, name: str) -> None:
    """An independent scorer gives the live engine's fingerprint on the joined partitions."""
    from transformers import AutoModelForCausalLM

    job = trained[name]
    assert losses(job)[-1] < losses(job)[0] - 0.1
    full = weights(job)
    assert all(torch.isfinite(t).all() and t.numel() for t in full.values())
    assert all(t.any() for n, t in full.items() if "lora_B" in n)
    model = load_trained(job, AutoModelForCausalLM)
    reference = Fingerprint.load(job.out / "fingerprint.fp")
    with torch.no_grad():
        rows = [model(torch.tensor([p])).logits[0, :-1].float() for p in reference.probes]
    logprobs = torch.log_softmax(torch.cat(rows), dim=-1)
    measured = replace(
        reference,
        logprobs=logprobs.gather(1, torch.from_numpy(reference.ids).long()).numpy(),
        top1=logprobs.argmax(-1).int().numpy(),
        engine="test",
    )
    assert reference.noise is not None
    assert drift(reference, measured).beyond(EXACT, reference.noise) == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_other_objectives_train(trained: Trained, name: str) -> None:
    job = trained[name]
    metrics = results(job)["metrics"]
    assert metrics["heldout_loss_after"] < metrics["heldout_loss_before"]
    assert complete(job.checkpoints) == []
    assert all(t.any() for n, t in weights(job).items() if "lora_B" in n)


def test_files_beside_the_weights(trained: Trained, tokenizer) -> None:
    names = {"shards", "partitions.json", "train.json", "config.json", "tokenizer",
             "generation_config.json", "fingerprint.fp"}  # fmt: skip
    for name, more in (("full_zero3", set()), ("qlora_zero2", {"adapter_config.json"})):
        out = trained[name].out
        assert {path.name for path in out.iterdir()} == names | more
        assert "quantization_config" not in read_json(out / "config.json")
        generation = read_json(out / "generation_config.json")
        assert generation["eos_token_id"] == tokenizer.eos_token_id
        assert read_json(out / "partitions.json")["dtype"] == "BF16"
        document = results(trained[name])
        assert document["base_digest"] == "b" * 64
        assert (document["quantization"] is None) == (name == "full_zero3")


def test_truncated_rows_are_reported_and_ranks_tokenise_as_one(
    trained: Trained, tmp_path: Path
) -> None:
    from tests.training.datasets import load

    job = trained["full_zero3"]
    lines = (job.data / "train.jsonl").read_text().splitlines()
    words = [json.loads(line)["messages"][1]["content"] for line in lines]
    alone = load(replace(job, checkpoints=tmp_path), ("text",))
    assert alone.lengths.max() == CUT_AT
    entry = tmp_path / "tokens" / "train"
    notes = read_json(entry / "notes.json")
    assert notes["truncated"] == sum(len(word) == 6 for word in words) > 0
    by_ranks = job.checkpoints / "tokens" / "train"
    for path in entry.iterdir():
        assert path.read_bytes() == (by_ranks / path.name).read_bytes(), path.name


SAME: dict[str, tuple[str, float, float | None]] = {
    "dora_zero3": ("dora_zero2", 2e-3, None),  # DoRA has its base weight under ZeRO-3
    "patterns_zero3": ("patterns_zero2", 2e-3, None),
    "checkpointed_zero3": ("lora_zero2", 2e-3, None),
    "fp32_zero3": ("fp32_zero2", 1e-5, 1e-5),
    "fp32_offload_zero3": ("fp32_zero3", 1e-5, 2e-5),
}
"""Job: the job that trains the same, and tolerances of losses and weights."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_engines_and_batches_do_not_change_the_training(trained: Trained, name: str) -> None:
    other, of_losses, of_weights = SAME[name]
    job, expected = trained[name], trained[other]
    assert losses(job) == pytest.approx(losses(expected), abs=of_losses)
    start, same_start, final = start_weights(job), start_weights(expected), weights(job)
    assert start.keys() == same_start.keys()
    assert all(torch.equal(tensor, same_start[n]) for n, tensor in start.items())
    if of_weights is not None:
        require_same_weights(expected.out, job.out, of_weights)
    if name == "patterns_zero3":
        ranks = {n: tensor.shape[0] for n, tensor in final.items() if ".lora_A." in n}
        assert len(ranks) == 2 * 6, "of seven linear maps one is excluded"
        assert not any("down_proj" in n for n in ranks)
        for n, rank in ranks.items():
            assert rank == (2 if "q_proj" in n else 6 if "layers.1.mlp.up_proj" in n else 4)
        assert [n for n in final if "modules_to_save" in n] == [
            "base_model.model.model.embed_tokens.modules_to_save.default.weight"
        ]


def test_rows_of_new_tokens_in_both_tables_of_an_untied_model(trained: Trained) -> None:
    job = trained["rows_untied_zero2"]
    indices = read_json(job.out / "adapter_config.json")["trainable_token_indices"]
    assert indices == {"model.embed_tokens": [259, 260], "lm_head": [259, 260]}
    assert read_json(job.out / "config.json")["vocab_size"] == 264
    before, after = start_weights(job), weights(job)
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


@pytest.mark.parametrize("name", OF_SCORES)
def test_a_reward_models_head_is_trained_in_full_and_saved(
    trained: Trained, name: str, tokenizer
) -> None:
    """Known failures elsewhere: `score.weight` not saved, saved as [0], or with a LoRA on it."""
    from transformers import AutoModelForSequenceClassification

    job = trained[name]
    full, start, config = weights(job), start_weights(job), read_json(job.out / "config.json")
    assert losses(job)[-1] < 0.5 * losses(job)[0]
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}  # two labels is transformers' default
    assert config["pad_token_id"] == tokenizer.pad_token_id
    key, hidden = "base_model.model.score.modules_to_save.default.weight", config["hidden_size"]
    draw = torch.Generator().manual_seed(job.settings.seed)
    drawn = torch.randn(1, hidden, generator=draw) / math.sqrt(hidden + 1)
    assert torch.equal(start[key], drawn.bfloat16())
    assert (full[key] != start[key]).float().mean() > 0.9
    assert [name for name in full if "score" in name and "lora" in name] == []
    adapter = read_json(job.out / "adapter_config.json")
    assert (adapter["task_type"], "score" in adapter["modules_to_save"]) == ("SEQ_CLS", True)
    assert all(tensor.any() for name, tensor in full.items() if "lora" in name)

    reference = ScorePrint.load(job.out / results(job)["print"])
    model = load_trained(job, AutoModelForSequenceClassification, num_labels=1, pad_token_id=None)
    with torch.no_grad():
        scores = [float(model(torch.tensor([p])).logits[0, 0]) for p in reference.probes]
    apart = score_drift(reference, replace(reference, scores=tuple(scores), engine="test"))
    assert apart.mean_difference < 1e-3
    assert apart.unit > 0.1
    assert reference.noise is not None
    assert reference.noise < 0.05 * apart.unit


@pytest.mark.parametrize("name", default_or_slow("best", "best_zero3"))
def test_the_best_weights_are_published_and_kept_beside_the_last(
    trained: Trained, name: str
) -> None:
    """A run with patience stops at the first evaluation that is worse."""
    job, document = trained[name], results(trained[name])
    by_step = {e["step"]: e["loss"] for e in document["evaluations"]}
    best = int(document["metrics"]["best_step"])
    last = best + 2 if job.settings.evaluate.early_stop_patience else 8
    assert list(by_step) == list(range(2, last + 1, 2))
    assert best == min(by_step, key=by_step.__getitem__) != 8
    assert len(document["losses"]) == document["metrics"]["steps"] == last
    assert document["metrics"]["heldout_loss_after"] == by_step[best]
    kept = [path.name for path in complete(job.checkpoints)]
    assert kept == [f"step-{best:08d}", f"step-{last:08d}"]


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(
    trained: Trained,
) -> None:
    job = trained["diverges"]
    failure = (job.out / "failure").read_text()
    (last,) = complete(job.checkpoints)
    assert str(last) in failure
    assert "samples s" in failure
    assert not (job.out / "train.json").exists()


def test_gradients_are_summed_in_fp32_and_biases_do_not_decay(trained: Trained) -> None:
    """DeepSpeed refuses fp32 sums of bf16 below ZeRO-2."""
    assert trained["full_zero3"].out.is_dir()
    sums = read_json(trained.folder / "default" / "engines" / "sums.json")
    whole = (256 + 15 * 0.5) / 16
    assert [gradient for gradient, *_ in sums[2:]] == [whole, whole]
    assert sums[0][0] < whole
    assert [[weight, bias] for _, weight, bias in sums] == [[0.75, 1.0]] * 4


def test_a_merged_qlora_model_is_not_quantised_again(tmp_path: Path, dataset: Path) -> None:
    from tests.weights.making import near_nf4

    settings = Settings(peft=Peft("qlora", rank=4, alpha=4))
    with pytest.raises(ConfigError, match="layers.0.mlp.up_proj") as caught:
        run_train(tmp_path, near_nf4(tmp_path / "merged", 0.01), dataset, settings)
    assert "peft=lora" in caught.value.hint


TOLERANCE = 1e-5
"""Largest difference of a number, and of a gradient relative to its largest number, in fp32."""
RATIO = 1e-4
"""Largest difference of a log-ratio: both of its sums are hundreds of nats."""


def require_same(alone: TrainJob, divided: TrainJob) -> None:
    """Compare a case's numbers and gradients with those on other ranks."""
    expected, measured = results(alone), results(divided)
    assert measured["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    for before, after in zip(expected["evaluations"], measured["evaluations"], strict=True):
        assert after == pytest.approx(before, rel=TOLERANCE, abs=RATIO)
    kind = ScorePrint if alone.settings.objective == "reward" else Fingerprint
    prints = [kind.load(job.out / expected["print"]) for job in (alone, divided)]
    numbers = [p.scores if kind is ScorePrint else p.logprobs.ravel() for p in prints]
    assert list(numbers[1]) == pytest.approx(list(numbers[0]), rel=TOLERANCE, abs=TOLERANCE)
    # AdamW with a large epsilon follows the gradient, as SGD does: equal weights, equal gradients.
    start, before, after = start_weights(alone), weights(alone), weights(divided)
    moved = [key for key in start if not torch.equal(start[key], before[key])]
    assert len(moved) > len(start) / 2
    for key in start:
        step = (before[key] - start[key]).abs().max()
        apart = float((after[key] - before[key]).abs().max())
        assert apart <= 3e-4 * max(float(step), 1e-4), (key, apart)


@pytest.mark.parametrize("name", default_or_slow(*(f"{name}_over_2" for name in SHARED)))
def test_two_ranks_share_rows_exactly(trained: Trained, name: str) -> None:
    require_same(trained[name.replace("over_2", "over_1")], trained[name])


@pytest.mark.slow
def test_any_number_of_ranks(trained: Trained) -> None:
    """One rank, two groups of two, and one of four, with fewer key heads than ranks."""
    names = ("sft", "dpo", "experts")
    alone = trained.train(trained.folder / "one", {n: shared(n, 1, 1) for n in names}, 1)
    for sharing in (2, 4):
        wanted = {name: shared(name, sharing, 4) for name in names}
        divided = trained.train(trained.folder / f"four-{sharing}", wanted, 4)
        for name in names:
            require_same(alone[name], divided[name])
