from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.drift.fingerprint import PROFILES
from tasks.evaluation.prompts import Tools
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.stage import StageReport
from tasks.smoke_eval import smoke_eval
from tests.serving.models import CONVERSATIONS, live_fingerprint, load, write_model
from tests.tiny import make_tokenizer


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return write_model(tmp_path_factory.mktemp("models") / "served", seed=1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the same tensor names and other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "base", seed=2)


@pytest.fixture(scope="session")
def probes() -> list[list[int]]:
    """The conversations as training sees them, with answers."""
    tokenizer = make_tokenizer()
    return [
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        for messages in CONVERSATIONS
    ]


@pytest.fixture(scope="session")
def trained(
    served: Path, probes: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The part of a training artifact that smoke_eval reads: the live fingerprint."""
    folder = tmp_path_factory.mktemp("trained")
    live_fingerprint(load(served), probes).save(folder / "fingerprint.fp")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset folder with held-out conversations."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"id": f"h{i}", "messages": m} for i, m in enumerate(CONVERSATIONS)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "heldout.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceScorer]:
    """One warm reference child for all tests."""
    log_path = tmp_path_factory.mktemp("logs") / "reference.log"
    log = logging.getLogger("tests.serving")
    with ReferenceScorer(log=log, log_path=log_path, timeout_s=240) as scorer_:
        scorer_.warm()
        yield scorer_


@pytest.fixture
def smoke(
    served: Path, base: Path, data: Path, trained: Path, scorer: ReferenceScorer, tmp_path: Path
) -> Callable[..., StageReport]:
    """Run smoke_eval of `served` against `base` in `tmp_path / "out"`; arguments override."""

    def call(tools: dict[str, Any] | None = None, **changes: Any) -> StageReport:
        arguments: dict[str, Any] = {
            "prompts": "chat", "served": served, "base": base, "data": data, "reference": trained,
            "profile": PROFILES["standard"], "log": logging.getLogger("tests.serving"),
        }  # fmt: skip
        out = tmp_path / "out"
        out.mkdir()
        arguments["tools"] = Tools(scorer=scorer, log_path=tmp_path / "smoke.log", **(tools or {}))
        return smoke_eval(out, **{**arguments, **changes})

    return call
