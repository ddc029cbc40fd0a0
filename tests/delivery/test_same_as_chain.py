"""A delivery of what our own training left has the bytes that the chain serves."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from tasks.convert import convert
from tasks.drift.fingerprint import PROFILES
from tasks.gather import gather
from tasks.merge import merge
from tests.delivery.conftest import Done
from tests.weights.making import Copies, copy_reference, failed

LOG = logging.getLogger("tests.deliver")
OUTPUT = {"dtype": "bfloat16", "max_shard_size": "5GB"}


def served_by_the_chain(shards: Path, base: Path, place: Path) -> Path:
    """Run gather, merge and convert of the chain; return the served folder."""
    adapter, weights, served = (place / name for name in ("adapter", "weights", "served"))
    for folder in (adapter, weights, served):
        folder.mkdir(parents=True)
    common = {"trained": shards, "profile": PROFILES["standard"], "log": LOG}
    score = copy_reference
    reports = [
        gather(adapter, base=base, scorer=Copies(), **common),
        merge(
            weights,
            adapter=adapter,
            base=base,
            base_mode="auto",
            rounding="nearest",
            output=OUTPUT,
            score=score,
            **common,
        ),
        convert(served, weights=weights, reference=adapter, score=score, **OUTPUT, **common),
    ]
    assert [failed(report.checks) for report in reports] == [[], [], []]
    return served


def test_shards_of_an_adapter(
    here: Callable[..., Done], shards: Path, ours: Path, tmp_path: Path
) -> None:
    shards = shutil.copytree(shards, tmp_path / "shards")
    path = shards / "generation_config.json"  # the base's, as training copied it
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [9, 2, 5]}))
    wanted = served_by_the_chain(shards, ours, tmp_path / "chain")
    out = tmp_path / "out"
    done = here(f"source={shards}", f"base={ours}", f"out={out}")
    assert done.stages == ["audit", "gather", "merge", "convert"], done.output
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (wanted / name).read_bytes(), name
    for name in ("config.json", "generation_config.json"):  # the tokenizer's and the base's
        assert json.loads((out / name).read_text())["eos_token_id"] == [0, 2, 9, 5]
