"""`push=<owner>/<name>`: the folder that was published, for its owner's eyes only."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.chain.register import push_served
from flows.cli.config import compose_config
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, in_this_process
from tasks.core.errors import ArtifactError, TrackingError
from tasks.pipeline.artifact import Artifact, Origin, publish
from tasks.pipeline.locks import staging
from tasks.release.model_card import card, write_card
from tasks.release.push import differences, push
from tests.answering import answering

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUv"
CREATE = "/api/repos/create"


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let this process be one whose user is logged in at a Hub."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(hf_api.constants, "ENDPOINT", url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def served(tmp_path: Path) -> Artifact:
    final = tmp_path / "served"
    with staging(final) as work:
        save_file({"w": np.arange(6, dtype=np.float32)}, work / "model-1.safetensors")
        (work / "config.json").write_text('{"model_type": "none"}')
        made = publish(work, final, Origin("served", "convert", "key"))
    write_card(final, card({"tags": ["plumbline"]}, "model", {"Training": ["- none"]}))
    return made


def test_a_new_repository_is_private_and_an_altered_folder_is_not_pushed(
    served: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering({CREATE: lambda _: {"url": f"{hub.url}/me/model"}}) as hub:
        use_hub(monkeypatch, hub.url)
        with pytest.raises(TrackingError, match="push=me/model"):
            push(served, "me/model")  # this Hub takes no files
        assert hub.bodies(CREATE)[0]["visibility"] == "private"
        (served.path / "config.json").write_text('{"rope_theta": 1}')
        hub.seen.clear()
        with pytest.raises(ArtifactError) as altered:
            push(served, "me/model")
        assert hub.seen == []
    assert "config.json" in " ".join(altered.value.details)


def test_a_copy_with_other_bytes_is_named(served: Artifact) -> None:
    from huggingface_hub import RepoFile

    def entry(name: str, content: bytes) -> RepoFile:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        digest = hashlib.sha256(content).hexdigest()
        large = {"oid": digest, "size": len(content), "pointerSize": 130}
        lfs = {"lfs": large} if name.endswith(".safetensors") else {}
        return RepoFile(path=name, size=len(content), oid=git, **lfs)

    files = {path.name: path.read_bytes() for path in served.path.iterdir()}
    assert list(differences(served.path, [entry(*item) for item in files.items()])) == []
    for name in files:
        altered = {**files, name: bytes(reversed(files[name]))}
        (line,) = differences(served.path, [entry(*item) for item in altered.items()])
        assert line.startswith(f"{name}: ")


def test_a_run_whose_push_fails_is_complete_and_says_what_to_type(
    served: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9")
    composed = compose_config([f"paths.runs={tmp_path / 'runs'}", "push=me/model"])
    host = in_this_process(uuid4().hex, logging.getLogger(__name__))
    flow_run = FlowRun.begin("rlhf", composed, host, tracker=Untracked())
    done = flow_run.run("a run", lambda run: push_served(run, served))
    assert (done["status"], done["exit_status"], done["pushed"]) == ("completed", 3, None)
    assert "push=me/model" in done["unpushed"]
    assert TOKEN not in (tmp_path / "runs/latest/summary.json").read_text()
