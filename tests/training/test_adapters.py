"""What section `peft` can ask for, trained by two ranks under ZeRO-2 and ZeRO-3.

The persistence threshold is 0: with DeepSpeed's own, a model as small as this one stays whole under
ZeRO-3, and nothing that a real model trips over would be seen.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.fingerprint import EXACT, Fingerprint, drift, within
from tasks.growing import grow
from tasks.training.examples import Example, Tokens, write_examples
from tasks.training.job import Batch, Optim, Peft, Settings, Zero
from tests.training.conftest import save_base
from tests.training.jobs import Left, Wanted, load_trained, run_jobs

ZERO3 = Zero(3, persistence_threshold=0)
LORA = Peft("lora", rank=4, alpha=8)
BASIC = Settings(
    optim=Optim(lr=5e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=4, max_len=64),
    peft=LORA,
    probes=8,
)
OPTIONS = {
    "dora": replace(LORA, use_dora=True),
    "pissa": replace(LORA, init="pissa"),
    "patterns": replace(
        LORA,
        use_rslora=True,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
        alpha_pattern={"q_proj": 32.0},
        exclude_modules=("down_proj",),
        modules_to_save=("embed_tokens",),
    ),
}
SETTINGS = {
    **{f"{name}_zero2": replace(BASIC, peft=peft) for name, peft in OPTIONS.items()},
    **{f"{name}_zero3": replace(BASIC, peft=peft, zero=ZERO3) for name, peft in OPTIONS.items()},
    "lora_zero2": BASIC,
    "checkpointed_zero3": replace(BASIC, zero=ZERO3, gradient_checkpointing=True),
    "reentrant_zero3": replace(
        BASIC,
        zero=ZERO3,
        gradient_checkpointing=True,
        gradient_checkpointing_reentrant=True,
    ),
    "fp4_pissa": replace(
        BASIC,
        peft=replace(LORA, kind="qlora", quant_type="fp4", double_quant=False, init="pissa"),
    ),
    "8bit": replace(BASIC, peft=Peft(), optim=replace(BASIC.optim, optimizer="adamw_8bit")),
    "8bit_zero3": replace(
        BASIC, peft=Peft(), zero=ZERO3, optim=replace(BASIC.optim, optimizer="adamw_8bit")
    ),
}
ROWS = {
    "rows_zero2": replace(BASIC, new_tokens=("copy", "<tool>")),
    "rows_zero3": replace(BASIC, new_tokens=("copy", "<tool>"), zero=ZERO3),
    "rows_untied_zero3": replace(BASIC, new_tokens=("copy", "<tool>"), zero=ZERO3),
    "rows_full_zero3": replace(BASIC, new_tokens=("copy", "<tool>"), peft=Peft(), zero=ZERO3),
}
FP32 = replace(BASIC, dtype="float32", probes=1)
FP32_JOBS = {"fp32_zero2": FP32, "fp32_zero3": replace(FP32, zero=ZERO3)}
ADAPTED = [name for name, one in (SETTINGS | ROWS).items() if one.peft.kind != "none"]


def write_words(folder: Path, tokenizer, begin: list[int]) -> Path:
    """64 examples: the ids that they begin with, and a word to say again."""
    draw = random.Random(0)

    def example(i: int) -> Example:
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 9)))
        ids = [*begin, *tokenizer(f" {word}: {word}")["input_ids"], tokenizer.eos_token_id]
        return Example(f"s{i}", (Tokens(ids, [False] * 5 + [True] * (len(ids) - 5)),))

    write_examples(folder, [example(i) for i in range(64)], roles=("text",), notes={})
    return folder


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, base: Path, tokenizer) -> dict[str, Left]:
    copy = tokenizer("copy")["input_ids"]
    data = write_words(tmp_path_factory.mktemp("examples"), tokenizer, copy)
    wanted = {name: Wanted(one, base, data) for name, one in (SETTINGS | FP32_JOBS).items()}
    wanted |= wanted_rows(tmp_path_factory.mktemp("grown"), base, tokenizer)
    return run_jobs(tmp_path_factory.mktemp("adapters"), wanted)


def wanted_rows(folder: Path, base: Path, tokenizer) -> dict[str, Wanted]:
    """Bases with two new tokens, and examples that begin with the first of them."""
    shutil.copytree(base, folder / "tied")
    save_base(folder / "untied", tokenizer, tie_word_embeddings=False)
    for kind in ("tied", "untied"):
        grow(folder / kind, ["copy", "<tool>"], multiple=8)
    (folder / "data").mkdir()
    data = write_words(folder / "data", tokenizer, [259])
    return {
        name: Wanted(one, folder / ("untied" if "untied" in name else "tied"), data)
        for name, one in ROWS.items()
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_zero3_trains_what_zero2_trains(left: dict[str, Left], name: str) -> None:
    """Adapters begin alike under every stage, and DoRA finds its base's weight under ZeRO-3."""
    two, three = left[f"{name}_zero2"], left[f"{name}_zero3"]
    assert two.losses == pytest.approx(three.losses, abs=2e-3)
    assert two.losses[-1] < two.losses[0] - 0.1
    start = two.stitched("start")
    assert {n: t.shape for n, t in start.items()} == {
        n: t.shape for n, t in three.stitched("start").items()
    }
    assert all(torch.equal(t, start[n]) for n, t in three.stitched("start").items())


@pytest.mark.parametrize("name", ADAPTED)
def test_the_files_are_the_model_that_was_trained(left: dict[str, Left], name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = load_trained(left[name], AutoModelForCausalLM)
    reference = Fingerprint.load(left[name].out / "print")
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


@pytest.mark.parametrize("name", ["pissa_zero2", "pissa_zero3"])
def test_pissa_begins_as_the_base_in_its_principal_components(
    left: dict[str, Left], base: Path, name: str
) -> None:
    """Meng et al. 2024, eq. 2 and 3; and the half that stands for them stays as it was."""
    assert left[name].losses[0] == pytest.approx(left["lora_zero2"].losses[0], abs=1e-4)
    said = left[name].json("adapter_config.json")
    assert (said["r"], said["lora_alpha"], said["init_lora_weights"]) == (8, 16, True)
    start, end = left[name].stitched("start"), left[name].stitched()
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


def test_patterns_and_whole_modules(left: dict[str, Left]) -> None:
    full = left["patterns_zero3"].stitched()
    ranks = {name: tensor.shape[0] for name, tensor in full.items() if ".lora_A." in name}
    assert len(ranks) == 2 * 6  # of seven linear maps one is excluded
    assert not any("down_proj" in name for name in ranks)
    for name, rank in ranks.items():
        assert rank == (2 if "q_proj" in name else 6 if "layers.1.mlp.up_proj" in name else 4)
    (saved,) = [name for name in full if "modules_to_save" in name]
    assert saved == "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    said = left["patterns_zero3"].json("adapter_config.json")
    assert said["modules_to_save"] == ["embed_tokens"]
    assert said["alpha_pattern"] == {"q_proj": 32.0}


@pytest.mark.parametrize("name", ["checkpointed_zero3", "reentrant_zero3"])
def test_gradient_checkpointing_changes_no_number(left: dict[str, Left], name: str) -> None:
    """`CheckpointError: recomputed metadata ... torch.Size([0])` on older stacks."""
    assert left[name].losses == pytest.approx(left["lora_zero2"].losses, abs=2e-3)
    assert all(t.any() for n, t in left[name].stitched().items() if "lora_B" in n)


def test_a_4_bit_model_is_neither_moved_nor_cast(left: dict[str, Left]) -> None:
    """`.to` is not supported for `4-bit`: in these jobs any such call raises, as it long did."""
    run = left["fp4_pissa"]
    assert run.losses[-1] < run.losses[0] - 0.1
    assert len(run.stitched()) == 2 * 14


def test_the_fused_layer_trains_what_pefts_own_does(left: dict[str, Left]) -> None:
    """Two ranks through DeepSpeed in fp32: losses and gathered adapters agree to 1e-5.

    Under ZeRO-3 a weight is gathered around its module, so that peft's own pass is used there.
    """
    fused, own = left["fp32_zero2"], left["fp32_zero3"]
    assert (fused.json("fused.json"), own.json("fused.json")) == (14, 0)
    assert fused.losses == pytest.approx(own.losses, abs=1e-5)
    assert fused.losses[-1] < fused.losses[0] - 0.1
    expected, found = (one.stitched(dtype=torch.float32) for one in (own, fused))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5)


def test_8bit_adamw_follows_the_same_path_under_both_stages(left: dict[str, Left]) -> None:
    two, three = left["8bit"].losses, left["8bit_zero3"].losses
    assert two == pytest.approx(three, rel=0.02)
    assert two[-1] < two[0] - 0.5


@pytest.mark.parametrize("name", ["rows_zero2", "rows_zero3"])
def test_rows_of_new_tokens_are_trained(left: dict[str, Left], name: str) -> None:
    """peft asks for CUDA here under ZeRO-3."""
    run = left[name]
    assert run.losses == pytest.approx(left["rows_zero2"].losses, abs=2e-3)
    assert run.losses[-1] < run.losses[0] - 0.1
    assert run.losses[0] == pytest.approx(left["rows_full_zero3"].losses[0], abs=2e-3)
    said = run.json("adapter_config.json")
    assert said["trainable_token_indices"] == {"model.embed_tokens": [259, 260]}
    (name,) = [n for n in run.stitched() if "trainable_tokens" in n]
    before, after = run.stitched("start")[name], run.stitched()[name]
    assert after.shape == (2, 64)
    assert (before != after).any(dim=1).all()
    assert run.json("config.json")["vocab_size"] == 264
    assert left["rows_full_zero3"].stitched()["model.embed_tokens.weight"].shape == (264, 64)


def test_rows_of_new_tokens_in_both_tables_of_an_untied_model(left: dict[str, Left]) -> None:
    run = left["rows_untied_zero3"]
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
