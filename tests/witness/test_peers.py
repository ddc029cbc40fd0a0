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

from tests.commands import command, environment, run_in_empty, summary_of
from tests.delivery.peers import SAVER, make_place, run_peer, train_llamafactory, train_swift
from tests.verify.serving import serve
from tests.witness.conftest import SCRIPT
from tests.witness.test_delivered import deliver

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def place(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("peers"), base)


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
    "llamafactory": (lambda p: train_llamafactory(p, "sft", witnessed=True), "none"),
    "llamafactory-nf4": (
        lambda p: train_llamafactory(p, "nf4", witnessed=True, quantization_bit=4),
        "nf4",
    ),
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
    """Without `merge.base`, which only the record tells: it says how the base was stored."""
    source = trained(name)
    facts: dict[str, Any] = json.loads((source / "plumbline.witness/witness.json").read_text())
    assert facts["quantization"]["method"] == TRAINED[name][1]
    more = () if name.endswith("full") else (f"base={place / 'base'}",)
    status, text = deliver(tmp_path, source, "smoke.engine=transformers", *more)
    assert status == 0, text
    assert "witness: " in text
    stages = {stage["name"]: stage for stage in summary_of(tmp_path / "runs")["stages"]}
    drifts = [stages[stage]["drift"]["mean_kl"] for stage in ("reference", "smoke_eval")]
    print(
        f"{name}: record {facts['seconds']} s, KL of files {drifts[0]:.1e}, merged {drifts[1]:.1e}"
    )
    assert max(drifts) < 1e-3
    assert facts["seconds"] < 10


def test_what_was_trained_is_what_is_served(
    trained: Callable[[str], Path], place: Path, tmp_path: Path
) -> None:
    """One server with the adapters of all trainers that had the base in 16 or 32 bits."""

    empty = tmp_path / "elsewhere"
    empty.mkdir()

    def verify(url: str, source: Path, name: str) -> tuple[int, str]:
        words = command("verify", f"url={url}", f"source={source}", f"name={name}")
        done = run_in_empty(empty, words, env=environment(), timeout=280)
        return done.returncode, done.stdout

    names = [n for n, (_, stored) in TRAINED.items() if stored == "none" and not n.endswith("full")]
    adapters = {name: trained(name) for name in names}
    # A free slot: on a CPU, vLLM 0.32 answers for the base with the adapter in the last one.
    options = ["--max-loras", str(len(adapters) + 1)]
    with serve(place / "base", adapters, log=tmp_path / "server.log", options=options) as server:
        for name, source in adapters.items():
            status, text = verify(server.url, source, name)
            if name == "llamafactory":  # it trains with its own template, which the base lacks
                assert status == 1, text
                assert "(template: template)" in text
            else:
                assert status == 0, f"{name}: {text}"
            other = next(key for key in names if key != name)
            status, text = verify(server.url, source, other)
            assert status == 1, f"{other} for {name}: {text}"
