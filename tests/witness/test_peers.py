"""Records that other trainers leave, by their own commands; what they saved is then delivered.

PLUMBLINE_PEERS=~/peers tests/delivery/peers.sh "llamafactory swift verl openrlhf transformers4"
PLUMBLINE_PEERS=~/peers .venv/bin/python -m pytest -m peers tests/witness/test_peers.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.delivery.peers import SAVER, make_place, run_peer, train_llamafactory, train_swift
from tests.witness.conftest import SCRIPT, assert_delivered, assert_served

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def place(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("peers"), base)


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
def trained(place: Path) -> Callable[[str], Path]:
    """Train once by each name, and return the folder."""
    folders: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in folders:
            folders[name] = TRAINED[name][0](place)
        return folders[name]

    return train


@pytest.mark.parametrize("name", TRAINED)
def test_what_was_trained_is_what_is_delivered(
    name: str, trained: Callable[[str], Path], place: Path, tmp_path: Path
) -> None:
    """The record also says how the base was stored."""
    source = trained(name)
    facts: dict[str, Any] = json.loads((source / "plumbline.witness/witness.json").read_text())
    assert facts["quantization"]["method"] == TRAINED[name][1]
    more = () if name.endswith("full") else (f"base={place / 'base'}",)
    drifts = assert_delivered(tmp_path, source, *more)
    print(f"{name}: mean KL {drifts}")


def test_what_was_trained_is_what_is_served(
    trained: Callable[[str], Path], place: Path, tmp_path: Path
) -> None:
    """One server with the adapters of all trainers that had the base in 16 or 32 bits."""
    names = [n for n, (_, stored) in TRAINED.items() if stored == "none" and not n.endswith("full")]
    assert_served(tmp_path, place / "base", {name: trained(name) for name in names})
