"""Checks of `rollout=server` and of `rl.staleness`, without and with a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.config.checks import model, servers
from tasks.core.finding import Finding
from tests.config.test_preflight_online import settings
from tests.machines import with_gpus

URL = "http://10.0.0.7:8000"


def of(rl: Any = None, **rollout: Any) -> dict[str, Any]:
    whole = settings(rollout={"engine": "server", **rollout}, rl=rl)
    usual = {"save_steps": 0, "eval_steps": 0, "keep": "last"}
    return {**whole, "train": {**usual, **whole["train"]}}


def checked(*, on_cpu: bool = True, rl: Any = None, **rollout: Any) -> list[Finding]:
    return servers.servers(of(rl, **rollout), model.TOY, on_cpu=on_cpu)


def test_started_servers_need_nothing_else() -> None:
    assert checked(servers=2) == []
    assert checked(urls=["http://127.0.0.1:8000", "http://localhost:8001/"]) == []


@pytest.mark.parametrize("both", [{"servers": 0}, {"servers": 2, "urls": [URL]}])
def test_servers_are_started_or_named(both: dict[str, Any]) -> None:
    (finding,) = checked(**both)
    assert finding.what == "rollout.servers"
    assert "rollout.servers=2, or rollout.urls=[" in finding.override


def test_servers_on_other_machines_need_a_shared_folder(tmp_path: Path) -> None:
    (finding,) = checked(urls=[URL, "http://127.0.0.1:8000"])
    assert (finding.what, finding.found) == ("rollout.sync_dir", f"none, with a server at {URL}")
    assert checked(urls=[URL], sync_dir=str(tmp_path / "made" / "later")) == []
    (relative,) = checked(urls=[URL], sync_dir="policies")
    assert "absolute path" in relative.allowed
    (file,) = checked(urls=[URL], sync_dir="/proc/version/policies")
    assert "/proc/version cannot" in file.allowed


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("10.0.0.7:8000", "http or https"),
        ("http://[::1:8000", "http or https"),
        ("http://127.0.0.1:8000/v1", "without a path (no /v1)"),
        ("http://me:secret@127.0.0.1:8000", "no login"),
    ],
)
def test_addresses_of_servers(url: str, allowed: str) -> None:
    (finding,) = servers.addresses([url])
    assert allowed in finding.allowed
    assert "secret" not in str(finding)


def test_an_address_is_there_once() -> None:
    (finding,) = servers.addresses([URL, URL])
    assert finding.found == f"{URL} twice"


def test_started_servers_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    assert checked(servers=2, on_cpu=False) == []
    (finding,) = checked(servers=2, tensor_parallel=2, on_cpu=False)
    assert finding.what == "rollout.servers"
    assert finding.found == "2 x rollout.tensor_parallel=2, beside train.nproc=2"
    assert "4 are visible" in finding.allowed


def test_a_cpu_has_no_tensor_parallel_servers() -> None:
    (finding,) = checked(servers=1, tensor_parallel=2)
    assert finding.override == "rollout.tensor_parallel=1"


def test_staleness_needs_servers_and_importance_weights() -> None:
    assert checked(servers=2, rl={"staleness": 1}) == []
    (finding,) = servers.staleness({**of({"staleness": 1}), "rollout": {"engine": "vllm"}})
    assert finding.found == "1 with rollout.engine=vllm"
    (finding,) = checked(servers=2, rl={"staleness": 1, "correction": "none"})
    assert finding.found == "1 with rl.correction=none"


def test_staleness_needs_room_between_checkpoints() -> None:
    whole = of({"staleness": 1}, servers=2)
    whole["train"] |= {"save_steps": 1, "eval_steps": 1}
    values = [finding.found for finding in servers.staleness(whole)]
    assert values == ["1 with train.save_steps=1", "1 with train.eval_steps=1"]
    whole["train"] |= {"save_steps": 0}
    assert list(servers.staleness(whole)) == [], "nothing is saved"


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of a server, and its answers by path; a path without one is not found."""
    answers: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = 200 if self.path in answers else 404
            content = json.dumps(answers.get(self.path, {"detail": "Not Found"})).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", answers
        running.shutdown()


def answers_of(url: str) -> list[Finding]:
    whole = of(urls=[url])
    whole["model"] = {**whole["model"], "path": "/models/base"}
    return list(servers.able(whole))


def test_a_server_that_does_not_run_is_named_with_the_command_to_type() -> None:
    (finding,) = answers_of("http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer (ConnectError" in finding.found
    command = finding.override
    assert command.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve /models/base --host")
    assert "--enable-lora --max-lora-rank 64" in command
    assert "--logprobs-mode processed_logprobs" in command


def test_another_server_is_no_vllm(server: Any) -> None:
    (finding,) = answers_of(server[0])
    assert "is no vLLM server: " in finding.found


def test_everything_that_a_server_lacks_is_named(server: Any) -> None:
    url, answers = server
    card = {"id": "base", "parent": None, "max_model_len": 64}
    choice = {"token_ids": None, "text": "a", "logprobs": None}
    answers |= {
        "/version": {"version": "0.9.1"},
        "/v1/models": {"data": [card]},
        "/v1/completions": {"model": "base", "choices": [choice]},
    }
    values = [finding.found for finding in answers_of(url)]
    rollout = of()["rollout"]
    needed = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    assert values[0] == f"{url}: max_model_len is 64, and {needed} are needed"
    assert "started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in values[1]
    assert "0 token ids and 0 log-probabilities" in values[2]
    assert "(vLLM 0.9.1)" in values[2]
    card["max_model_len"] = needed
    choice |= {"token_ids": [5], "logprobs": {"token_logprobs": [-1.5]}, "finish_reason": "length"}
    answers["/v1/load_lora_adapter"] = {}
    assert answers_of(url) == []
