"""Adapters, reward models and records by the trainers themselves; what they saved is delivered.

    PEERS="llamafactory swift verl openrlhf transformers4 transformers440"
    PLUMBLINE_PEERS=~/peers tests/delivery/peers.sh "$PEERS"
    PLUMBLINE_PEERS=~/peers .venv/bin/python -m pytest -m peers tests/delivery/test_peers.py

Each trainer runs in its own environment below $PLUMBLINE_PEERS; without it, its tests are skipped.
LLaMA-Factory and ms-swift run by their command lines; save_peers.py does the rest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.delivery.conftest import Done
from tests.delivery.making import merged_by_peft
from tests.delivery.peers import SAVER, make_place, run_peer, train_llamafactory, train_swift
from tests.delivery.test_heads import without_head
from tests.weights.making import ROWS, quiet, rounded_alike, state_of
from tests.witness.conftest import SCRIPT, assert_delivered, assert_served, make_base

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]

Run = Callable[..., Done]
Tensors = dict[str, torch.Tensor]
NEW_TOKENS = ",".join(f"<new-{index}>" for index in range(45))
"""More than the unused rows of the embedding, so that LLaMA-Factory resizes it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("peers"))


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    """Compare by name: equal but for sums that lie between two bf16 numbers; all tensors there."""
    missing = theirs.keys() - ours.keys() - {"lm_head.weight"}
    assert not missing
    assert [key for key, tensor in ours.items() if not rounded_alike(tensor, theirs[key])] == []


def test_llamafactory_with_new_tokens(here: Run, place: Path, tmp_path: Path) -> None:
    """`add_tokens` with `resize_vocab`: both embeddings are grown and saved in full."""
    base = place / "base"
    source = train_llamafactory(place, "tokens", add_tokens=NEW_TOKENS, resize_vocab=True)
    saved = load_file(source / "adapter_model.safetensors")
    (rows,) = {len(tensor) for name, tensor in saved.items() if "embed_tokens" in name}
    assert rows > ROWS
    here(f"source={source}", f"base={base}", "merge.base=original")
    assert_equal(state_of(tmp_path / "out"), merged_by_peft(base, source, rows - ROWS))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == rows


def test_llamafactory_reward_model(here: Run, place: Path, tmp_path: Path) -> None:
    """The value head beside the adapter stays there, and the language model is peft's merge."""
    base = place / "base"
    source = train_llamafactory(place, "rm", stage="rm", dataset="pairs")
    here(f"source={source}", f"base={base}", "merge.base=original")
    assert_equal(state_of(tmp_path / "out"), merged_by_peft(base, source, 0))
    assert (source / "value_head.safetensors").is_file()
    assert without_head(tmp_path / "out")


def test_swift_reward_model(here: Run, place: Path, tmp_path: Path) -> None:
    """`modules_to_save: [v_head, ...]` names modules that the model lacks; peft tolerates it."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = place / "base"
    source = train_swift(place, "rm", "rlhf", "--rlhf_type", "rm")
    assert "v_head" in json.loads((source / "adapter_config.json").read_text())["modules_to_save"]
    here(f"source={source}", f"base={base}")
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=torch.float32
        )
        merged = PeftModel.from_pretrained(model, source).merge_and_unload()
    ours = state_of(tmp_path / "out")
    assert "score.weight" in ours
    wanted = {
        name: tensor.to(ours[name].dtype)
        for name, tensor in merged.state_dict().items()
        if name in ours
    }
    assert_equal(ours, wanted)


@pytest.mark.parametrize("kind", ["reward", "critic"])
def test_openrlhf_loses_the_head(here: Run, kind: str, place: Path, tmp_path: Path) -> None:
    """A LoRA adapter on q, v of a reward model or critic holds no head: it is refused."""
    source = place / f"openrlhf-{kind}"
    run_peer(
        "openrlhf", str(SAVER), "openrlhf", str(place / "base"), str(source), kind,
        cwd=place / "work-openrlhf",
    )  # fmt: skip
    assert not [name for name in load_file(source / "adapter_model.safetensors") if "score" in name]
    done = here(f"source={source}", f"base={place / 'base'}", "merge.base=original", code=2)
    assert "HEAD_MISSING" in done.output
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `place`, with the toy's tokenizer and heads that vLLM serves on a CPU."""
    root = tmp_path_factory.mktemp("policies")
    return make_place(root, make_base(root / "made"))


def llamafactory(place: Path, name: str, **changes: Any) -> Path:
    """Train with the base's own template, as the server renders: any other is a fault."""
    return train_llamafactory(place, name, witnessed=True, template=None, **changes)


def transformers4(place: Path, peer: str, kind: str) -> Path:
    """Train with an older transformers by the script that other tests run with the newest."""
    out = place / f"{peer}-{kind}"
    words = (str(SCRIPT), kind, str(place / "base"), str(out))
    run_peer(peer, *words, cwd=place / f"work-{out.name}", witnessed=True)
    return out / "checkpoint-2"


def openrlhf(place: Path) -> Path:
    """Save a policy as OpenRLHF does, and record it by the function."""
    out = place / "openrlhf-actor"
    words = (str(SAVER), "openrlhf", str(place / "base"), str(out), "actor")
    run_peer("openrlhf", *words, cwd=place / "work-openrlhf", witnessed=True)
    return out


def verl(place: Path) -> Path:
    """Save a policy that FSDP 2 has sharded, as verl does, and record it on both ranks."""
    out = place / "verl" / "actor"
    words = ("--nproc-per-node", "2", str(SAVER), "verl", str(place / "base"), str(out))
    run = ("-m", "torch.distributed.run", "--standalone", *words)
    run_peer("verl", *run, cwd=place / "work-verl", witnessed=True)
    merged = place / "verl" / "merged"
    merge = ("--local_dir", str(out), "--target_dir", str(merged))
    run_peer(
        "verl", "-m", "verl.model_merger", "merge", "--backend", "fsdp", *merge,
        cwd=place / "work-verl",
    )  # fmt: skip
    shutil.copytree(out / "plumbline.witness", merged / "lora_adapter" / "plumbline.witness")
    return merged / "lora_adapter"


TRAINED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llamafactory": (lambda p: llamafactory(p, "sft"), "none"),
    "llamafactory-nf4": (lambda p: llamafactory(p, "nf4", quantization_bit=4), "nf4"),
    "swift": (lambda p: train_swift(p, "sft", "sft", witnessed=True), "none"),
    "swift-nf4": (
        lambda p: train_swift(
            p, "nf4", "sft", "--quant_method", "bnb", "--quant_bits", "4", witnessed=True
        ),
        "nf4",
    ),
    "transformers-4.57": (lambda p: transformers4(p, "transformers4", "lora"), "none"),
    "transformers-4.57-full": (lambda p: transformers4(p, "transformers4", "full"), "none"),
    "transformers-4.40": (lambda p: transformers4(p, "transformers440", "lora"), "none"),
    "openrlhf": (openrlhf, "none"),
    "verl": (verl, "none"),
}


@pytest.fixture(scope="module")
def policy(toys: Path) -> Callable[[str], Path]:
    """Train once by each name, and return the folder."""
    folders: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in folders:
            folders[name] = TRAINED[name][0](toys)
        return folders[name]

    return train


@pytest.mark.parametrize("name", TRAINED)
def test_what_was_trained_is_what_is_delivered(
    name: str, policy: Callable[[str], Path], toys: Path, tmp_path: Path
) -> None:
    """The record also says how the base was stored."""
    source = policy(name)
    facts: dict[str, Any] = json.loads((source / "plumbline.witness/witness.json").read_text())
    assert facts["quantization"]["method"] == TRAINED[name][1]
    more = () if name.endswith("full") else (f"base={toys / 'base'}",)
    drifts = assert_delivered(tmp_path, source, *more)
    print(f"{name}: mean KL {drifts}")


def test_what_was_trained_is_what_is_served(
    policy: Callable[[str], Path], toys: Path, tmp_path: Path
) -> None:
    """One server with the adapters of all trainers that had the base in 16 or 32 bits."""
    names = [n for n, (_, stored) in TRAINED.items() if stored == "none" and not n.endswith("full")]
    assert_served(tmp_path, toys / "base", {name: policy(name) for name in names})
