"""`push=<owner>/<name>`: byte for byte, after the gate, refused before any work if it cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.chain.register import push_served
from flows.cli.config import compose_config
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, in_this_process
from tasks.config.checks import tracking
from tasks.core.errors import ArtifactError, TrackingError
from tasks.pipeline.artifact import Artifact, Origin, publish
from tasks.pipeline.staging import staging
from tasks.release.model_card import card, write_card
from tasks.release.push import push
from tests.release.hub import TOKEN, Hub, hub_on_loopback


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, and this process as one whose user is logged in there."""
    from huggingface_hub import constants, hf_api

    with hub_on_loopback() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(hf_api.constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own
        monkeypatch.setattr(tracking, "_known", {})
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made


@pytest.fixture
def served(tmp_path: Path) -> Artifact:
    final = tmp_path / "served"
    with staging(final) as work:
        save_file({"w": np.arange(6, dtype=np.float32)}, work / "model-1.safetensors")
        (work / "config.json").write_text('{"model_type": "none"}')
        made = publish(work, final, Origin("served", "convert", "key"))
    write_card(final, card({"tags": ["plumbline"]}, "model", {"Training": ["- none"]}))
    return made


def problems(repo: str, engine: str = "vllm") -> str:
    return "; ".join(str(finding) for finding in tracking.hub(repo, engine))


def test_the_repository_becomes_the_folder(hub: Hub, served: Artifact) -> None:
    assert problems("me/model") == ""
    done = push(served, "me/model")
    assert done == {"repo": "me/model", "url": f"{hub.url}/me/model", "commit": f"{1:040d}"}
    assert hub.created["visibility"] == "private"
    pushed = {path: content for path, content in hub.files.items() if path != ".gitattributes"}
    assert pushed == {p.name: p.read_bytes() for p in served.path.iterdir()}
    assert hub.commits == [f"Plumbline, digest {served.digest[:12]}"]

    hub.files["model-2.safetensors"] = b"of an earlier model"
    hub.files["config.json"] = b"{'old': 1}"
    push(served, "me/model")
    assert hub.files.keys() - {".gitattributes"} == {p.name for p in served.path.iterdir()}
    assert hub.files["config.json"] == (served.path / "config.json").read_bytes()


def test_a_copy_with_other_bytes_is_found_and_an_altered_folder_is_not_pushed(
    hub: Hub, served: Artifact
) -> None:
    for name in ("model-1.safetensors", "config.json"):
        hub.damage = name
        with pytest.raises(TrackingError) as error:
            push(served, "me/model")
        assert [line.partition(":")[0] for line in error.value.details] == [name]
    (served.path / "config.json").write_text('{"rope_theta": 1}')
    hub.asked.clear()
    with pytest.raises(ArtifactError) as altered:
        push(served, "me/model")
    assert "config.json" in " ".join(altered.value.details)
    assert hub.asked == []


def test_a_run_whose_push_fails_is_complete_and_says_what_to_type(
    hub: Hub, served: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = compose_config([f"paths.runs={tmp_path / 'runs'}", "push=me/model"])
    host = in_this_process(uuid4().hex, logging.getLogger(__name__))
    flow_run = FlowRun.begin("rlhf", composed, host, tracker=Untracked())
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    done = flow_run.run("a run", lambda run: push_served(run, served))
    assert (done["status"], done["exit_status"], done["pushed"]) == ("completed", 3, None)
    assert "push=me/model" in done["unpushed"]
    assert TOKEN not in (tmp_path / "runs/latest/summary.json").read_text()


def test_it_is_refused_before_any_work(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for repo in ("model", "me/../model"):
        assert "<owner>/<name>" in problems(repo)
    assert problems("me/model", "none") != "", "only what an engine has loaded"
    assert "me, acme, not to you" in problems("you/model")
    assert problems("acme/model") == ""
    tracking._known.clear()
    hub.role = "read"
    assert "read" in problems("me/model")
    tracking._known.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrong")
    refused = problems("me/model")
    assert "401" in refused
    assert "hf_wrong" not in refused
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    assert "export HF_TOKEN=" in problems("me/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in problems("me/model")
