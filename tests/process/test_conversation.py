"""A child process that answers requests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.core.errors import PlumblineError, StageProcessError
from tasks.process.launch import Conversation
from tests.process.conftest import alive

CHILD = """
import json, os, sys, time
from tasks.core.events import emit
print("warming up")
emit("ready")
for line in sys.stdin:
    request = json.loads(line)
    print("asked", request["do"])
    if request["do"] == "double":
        emit("progress", at=1)
        emit("reply", value=request["value"] * 2, pid=os.getpid())
    elif request["do"] == "refuse":
        emit("error", message="cannot do that", details=["why", "so"], hint="ask for less")
    elif request["do"] == "die":
        print("out of memory")
        sys.exit(5)
    else:
        time.sleep(600)
print("goodbye")
"""

Talk = Callable[..., Conversation]


@pytest.fixture
def talk(tmp_path: Path, log: logging.Logger) -> Talk:
    def start(code: str = CHILD, **options: object) -> Conversation:
        argv = [sys.executable, "-c", code]
        log_path = tmp_path / "talk.log"
        return Conversation(argv, stage="score", log=log, log_path=log_path, **options)  # type: ignore[arg-type]

    return start


def test_one_process_answers_many_requests(talk: Talk, tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    with talk(on_event=seen.append) as child:
        answers = [child.ask({"do": "double", "value": i}, 20) for i in (1, 2, 3)]
        big = child.ask({"do": "double", "value": "x" * 300_000}, 20)
    assert [answer["value"] for answer in answers] == [2, 4, 6]
    assert len({answer["pid"] for answer in answers}) == 1
    assert len(big["value"]) == 600_000
    assert seen == [{"event": "progress", "at": 1}] * 4
    assert not alive(answers[0]["pid"])
    logged = (tmp_path / "talk.log").read_text().splitlines()
    assert logged == ["warming up", *["asked double"] * 4, "goodbye"]


def test_a_refusal_is_an_error_and_the_child_stays(talk: Talk) -> None:
    with talk() as child:
        with pytest.raises(PlumblineError, match="score: cannot do that") as caught:
            child.ask({"do": "refuse"}, 20)
        assert (caught.value.details, caught.value.hint) == (("why", "so"), "ask for less")
        assert child.ask({"do": "double", "value": 4}, 20)["value"] == 8


def test_a_child_that_dies(talk: Talk) -> None:
    with talk() as child:
        for _ in range(2):  # it stays dead
            with pytest.raises(StageProcessError, match=r"status 5.*out of memory") as caught:
                child.ask({"do": "die"}, 20)
            assert (caught.value.returncode, caught.value.reason) == (5, "exit")


def test_a_child_that_is_too_slow(talk: Talk) -> None:
    with talk() as child:
        pid = child.ask({"do": "double", "value": 1}, 20)["pid"]
        with pytest.raises(StageProcessError) as caught:
            child.ask({"do": "sleep"}, 0.5)
        assert caught.value.reason == "timeout"
        assert not alive(pid)
