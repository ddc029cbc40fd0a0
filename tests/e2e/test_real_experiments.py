"""The experiments for real hardware, run: a tiny model of the same family, and the same options.

Overridden is only what this machine cannot have: the weights, and more ranks than two, with the
batch of a step in proportion. The Qwen2 of the embedded default stands for Qwen3, its context
raised; random models of their families for Llama 3.1 and Qwen3-30B-A3B; for the reward model a
random Qwen2 of one layer, 5120 wide as the model whose `score.lora_A` was once saved as
`torch.Size([0])`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tasks.pipeline.artifact import open_artifact, verify
from tasks.toy.dataset import write_dataset
from tasks.toy.splits import corpus
from tasks.toy.tokenizer import train_tokenizer
from tests.e2e.conftest import Run
from tests.e2e.tracked import children, curve

pytestmark = pytest.mark.slow
STAGES = ["prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"]
UNTRAINED = ("smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1")
"""A random model never stops."""


def with_context(base: Path, folder: Path, tokens: int) -> Path:
    """The embedded default's base, made for longer texts: rotary positions have no table."""
    shutil.copytree(base, folder)
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return folder


def at_random(folder: Path, family: str, **sizes: int) -> Path:
    """An untrained model of a family in bfloat16, with a tokenizer of its own."""
    import torch
    import transformers

    talk = [text for pair in corpus(400, seed=1) for text in pair]
    tokenizer = train_tokenizer(talk, context=sizes["max_position_embeddings"])
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Write JSON Lines of so many conversations or pairs."""

    def write(kind: str, count: int) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        write_dataset(folder, train_size=count, heldout_size=8, seed=0, rows=kind)
        return folder / "train.jsonl"

    return write


@pytest.fixture
def start(rlhf: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Run the literal command in its own folder, and check what is true of every experiment."""

    def run(experiment: str, base: Path, data: Path, *overrides: str) -> Run:
        words = (f"model.path={base}", f"data.path={data}")
        words += ("smoke.max_new_tokens=64",)  # an untrained model never stops
        done = rlhf(tmp_path / "runs", f"+exp={experiment}", *words, *overrides)
        assert done.code == 0, done.output
        assert [s["name"] for s in done.summary["stages"]] == [*STAGES, "register"]
        for stage in done.summary["stages"][:-1]:
            assert verify(open_artifact(Path(stage["artifact"]))) == []
        assert {child.info.status for child in children(done).values()} == {"FINISHED"}
        return done

    return run


def adapter_shapes(run: Run) -> dict[str, list[int]]:
    path = Path(run.stage("gather")["artifact"]) / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 -- no mapping
            assert ".lora_A." in name or file.get_tensor(name).any(), f"{name} was not trained"
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def test_dpo_lora_zero3_with_its_optimizer_in_host_memory(
    start: Callable[..., Run], chain: Run, rows: Callable[[str, int], Path], tmp_path: Path
) -> None:
    base = with_context(chain.artifact("prepare_base"), tmp_path / "qwen", 4096)
    done = start(
        "dpo_lora_zero3", base, rows("pairs", 700), "train.nproc=2", "train.global_batch_size=32",
        "zero.offload_optimizer=cpu", "peft.rank=32", "peft.dropout=0.05", "train.lr=5e-7",
        "train.log_every=10", "tracking.tensorboard=true",
    )  # fmt: skip
    losses = curve(done, "train/loss")
    assert len(losses) == 3  # of 21 steps: every tenth, and the last
    # At 5e-7 twenty steps move next to nothing: ln 2 is where DPO begins.
    assert losses == pytest.approx([0.6931] * 3, abs=0.01)
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    shapes = adapter_shapes(done)
    assert len(shapes) == 4 * 7 * 2
    assert {min(shape) for shape in shapes.values()} == {32}
    assert list((done.runs / "tensorboard").rglob("events.out.tfevents.*"))


def test_sft_lora_zero3_of_a_mixture_of_experts(
    start: Callable[..., Run], rows: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """Every expert has an adapter, and peft doubles the rank of two fused maps."""
    base = at_random(
        tmp_path / "qwen", "Qwen3Moe", hidden_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=2048,
    )  # fmt: skip
    done = start(
        "recipes/qwen3-30b-a3b/sft_lora_zero3", base, rows("conversations", 700),
        "train.nproc=2", "train.global_batch_size=32", *UNTRAINED,
    )  # fmt: skip
    losses = curve(done, "train/loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    experts = [shape for name, shape in adapter_shapes(done).items() if "experts" in name]
    assert sorted(map(min, experts)) == [8 * 4] * 4 + [16 * 4] * 4


def test_reward_lora_zero3(
    start: Callable[..., Run], rows: Callable[[str, int], Path], tmp_path: Path
) -> None:
    base = at_random(
        tmp_path / "qwen", "Qwen2", hidden_size=5120, intermediate_size=1024, num_hidden_layers=1,
        num_attention_heads=40, num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    done = start(
        "reward_lora_zero3", base, rows("pairs", 100), "train.lr=1e-5", "train.micro_batch_size=4",
        "train.nproc=2", "train.global_batch_size=16",  # 64 would be in proportion: minutes a step
    )  # fmt: skip
    # Six steps at 1e-5 from a random model teach it next to nothing: their loss is noise.
    assert len(curve(done, "train/loss")) == 6
    assert done.stage("gather")["drift"]["max_difference"] == 0.0
    shapes = adapter_shapes(done)
    assert shapes["base_model.model.score.weight"] == [1, 5120]
    assert not [name for name in shapes if "score" in name and "lora" in name]
    assert len(shapes) == 7 * 2 + 1
    assert all(min(shape) >= 1 for shape in shapes.values())
