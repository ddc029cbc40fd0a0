"""Rewards: their sum, a user's function, an HTTP endpoint, and all their faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ConfigError, RewardError
from tasks.rl import rewards as sources
from tasks.rl.rewards import Endpoint, Function, Rewards, Weighted, exact_matches, validate_rewards
from tasks.rl.settings import Reward
from tasks.rl.user_code import FunctionReference
from tests.answering import Reply, answering
from tests.conftest import PROJECT
from tests.rl.making import LOG, TOKENIZER, Open, judge, response, responses


def test_the_total_is_the_weighted_sum_of_unweighted_parts() -> None:
    exact = Weighted("function", 2.0, exact_matches)
    sizes = [judge(lambda r: len(r.text), name, of) for name, of in (("model", -0.5), ("url", 0.0))]
    texts = [*responses(), response("copy cow", "bull", answer="cow")]
    texts.append(response("copy ape", " ape\n", answer="ape"))
    scored = Rewards([exact, *sizes]).score(texts)
    right, size, mute = ([r.parts[name] for r in scored] for name in ("function", "model", "url"))
    assert right == [1, 1, 1, 1, 0, 1]
    assert size == mute == [3, 6, 3, 26, 4, 5]
    assert [r.reward for r in scored] == [2 * a - 0.5 * b for a, b in zip(right, size, strict=True)]
    with pytest.raises(RewardError, match="row of copy cow.*answer"):
        exact_matches([response("copy cow", "cow", answer=7)])


@pytest.mark.parametrize(
    ("rewards", "named"),
    [
        ([1.0, 2.0, float("nan"), 0.0], "nan for row of copy cat"),
        ([1.0, None, 0.0, 0.0], "None for row of copy beetle"),
        ([1.0, 2.0], "2 rewards for 4"),
        (None, "None"),
    ],
)
def test_invalid_rewards(rewards: object, named: str) -> None:
    with pytest.raises(RewardError, match=f"judge .*{named}") as caught:
        validate_rewards(rewards, responses(), "judge")
    assert any(line.startswith("prompt: 'copy ") for line in caught.value.details)


FUNCTIONS = """
import asyncio, json, numpy
from neighbour import nines

def score(prompts, completions, completion_ids, **columns):
    for each in (prompts, completions, completion_ids, *columns.values()):
        assert isinstance(each, list) and len(each) == 4, each
    assert prompts[0] == [{"role": "user", "content": "copy ape"}]
    assert completions[1] == [{"role": "assistant", "content": "beetle"}]
    assert len(completion_ids[2]) == len("cat") + 1
    assert sorted(columns) == ["answer", "id", "level", "messages"], columns
    print("a line without an end and @nothing", end="")
    return [float(a == c[0]["content"]) + columns["level"][0] for a, c in
            zip(columns["answer"], completions)]

async def awaited(prompts):
    return [len(p) for p in prompts]

async def length(a):
    return len(a)

def array(answer):
    return numpy.array(nines(answer)) - [asyncio.run(length(a)) for a in answer] > 5

def divides(answer):
    return [1 / (len(a) - 6) for a in answer]
"""


@pytest.fixture
def made(opened: Open, tmp_path: Path) -> Callable[..., Function]:
    """Return a factory that opens a function of `FUNCTIONS`, or of another text."""
    (tmp_path / "neighbour.py").write_text("def nines(prompts):\n    return [9] * len(prompts)")

    def make(name: str, text: str = FUNCTIONS, *, timeout_s: float = 60.0) -> Function:
        function = opened(text, name, "reward.function", timeout_s=timeout_s)
        assert isinstance(function, Function)
        return function

    return make


def test_it_gets_the_arguments_of_trl_and_every_column(
    made: Callable[..., Function], tmp_path: Path
) -> None:
    score = made("score")
    assert score(responses(level=3, completion="of the data")) == [4.0] * 4
    assert score(responses(level=5)) == [6.0] * 4
    score.close()
    assert "a line without an end and @nothing" in (tmp_path / "output.log").read_text()
    answered = [{"role": "user", "content": "copy ape"}, {"role": "assistant", "content": "ape"}]
    only = response("copy ape", "ape", messages=answered)
    assert made("awaited")([only]) == [1.0], "without the answer"


def test_the_function_that_the_guide_shows(made: Callable[..., Function]) -> None:
    """Users copy it; it crashed once."""
    page = (PROJECT / "docs/guides/own.md").read_text()
    (text,) = re.findall(r"^```python\n(# rewards\.py.*?)^```", page, re.M | re.S)
    texts = [*responses(), response("copy cow", "bull", answer="cow")]
    assert made("score", text)(texts) == [1, 1, 1, 1, 0]


def test_an_array_a_loop_of_its_own_and_a_file_beside_it(made: Callable[..., Function]) -> None:
    assert made("array")(responses()) == [1, 0, 1, 0]


def test_an_exception_is_reported_with_its_traceback(made: Callable[..., Function]) -> None:
    score = made("divides")
    with pytest.raises(RewardError, match="ZeroDivisionError") as caught:
        score(responses())
    assert "4 responses, first row of copy ape" in caught.value.message
    assert "judge.py:divides" in caught.value.message
    assert "prompt: 'copy ape'" in caught.value.details
    assert any("return [1 / (len(a) - 6)" in line for line in caught.value.details)
    assert not any("user_code.py" in line for line in caught.value.details)
    assert score([responses()[0]]) == [-1 / 3], "it goes on after an exception"


def test_a_function_that_hangs_is_killed_with_its_children(
    made: Callable[..., Function], tmp_path: Path
) -> None:
    text = f"""
import os, re, subprocess
from pathlib import Path

def score(answer):
    child = subprocess.Popen(["sleep", "1000"])
    Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
    re.match("(a+)+$", "a" * 60 + "b")  # in C, with the interpreter's lock held
"""
    with pytest.raises(RewardError, match="on 4 responses.*2 s") as caught:
        made("score", text, timeout_s=2.0)(responses())
    assert any("judge.py" in line and "in score" in line for line in caught.value.details)
    assert "reward.timeout_s" in caught.value.hint
    pids = (tmp_path / "pids").read_text().split()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_name_is_looked_up_without_running_the_file(tmp_path: Path) -> None:
    for text in ("judge.py", "judge:score", "judge.py:a.b"):
        with pytest.raises(ConfigError, match="path.py:name"):
            FunctionReference.of(text)
    path = tmp_path / "judge.py"
    score = FunctionReference.of(f"{path}:score")
    for refused in (None, "def score(:", "def a():\n    score = 1\nclass B: ..."):
        if refused is not None:
            path.write_text(refused)
        with pytest.raises(ConfigError, match="judge.py"):
            score.require()
    path.write_text("if 1:\n    a, (score, b) = 1, (2, 3)\nraise")
    score.require()


@dataclass
class Server:
    """Answers by `plan` first, then with the lengths of the completions."""

    plan: list[Callable[[], Reply]] = field(default_factory=list)
    asked: Any = None

    def __call__(self, body: dict[str, Any]) -> Any:
        if self.plan:
            return self.plan.pop(0)()
        return {"rewards": [len(completion) for completion in body["completions"]]}

    @property
    def requests(self) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = self.asked.bodies("/get_reward")
        return bodies

    def rewards(self, **reward: Any) -> list[float]:
        return ask(f"{self.asked.url}/get_reward", **reward)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on this machine, without delays."""
    monkeypatch.setattr(sources, "FIRST_PAUSE_S", 0.01)
    made = Server()
    with answering({"/get_reward": made}) as made.asked:
        yield made


def ask(url: str, **reward: Any) -> list[float]:
    endpoint = Endpoint(url, Reward(url=url, **{"retries": 0, **reward}), TOKENIZER, LOG)
    with closing(endpoint):
        return endpoint(responses())


def says(content: bytes, status: int = 200) -> Callable[[], Reply]:
    return lambda: Reply(status, content)


def test_the_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUMBLINE_REWARD_TOKEN", "of-the-environment")
    assert server.rewards(batch=3) == [3.0, 6.0, 3.0, 26.0]
    body, rest = server.requests
    assert sorted(body) == ["completions", "labels", "prompts", "query", "rows"]
    assert body["query"][0] == (
        "<|im_start|>user\ncopy ape<|im_end|>\n<|im_start|>assistant\nape<|im_end|>"
    )
    assert body["prompts"][0] == "<|im_start|>user\ncopy ape<|im_end|>\n<|im_start|>assistant\n"
    assert body["labels"] == body["completions"]
    assert body["rows"][1]["id"] == "row of copy beetle"
    assert server.asked.seen[0][2]["Authorization"] == "Bearer of-the-environment"
    assert [len(each["prompts"]) for each in (body, rest)] == [3, 1]


def test_temporary_errors_are_retried(server: Server) -> None:
    def hangs_up() -> Reply:
        raise ConnectionAbortedError

    server.plan = [says(b"no memory", 503), hangs_up, says(b"slowly", 429)]
    assert server.rewards(retries=3) == [3.0, 6.0, 3.0, 26.0]
    assert len(server.requests) == 4
    assert server.requests[3] == server.requests[0]


def test_a_server_that_is_down_is_named_without_its_password() -> None:
    with pytest.raises(RewardError, match="1 attempts") as caught:
        ask("http://user:word@127.0.0.1:9/rewards?token=secret")
    assert "http://user:***@127.0.0.1:9/rewards?token=***" in caught.value.message
    assert "word" not in caught.value.report()
    assert "secret" not in caught.value.report()


@pytest.mark.parametrize("content", [b"<html>", b'{"scores": [1]}', b'{"rewards": [1, 2, NaN, 4]}'])
def test_invalid_answers(server: Server, content: bytes) -> None:
    server.plan = [says(content)]
    with pytest.raises(RewardError, match=r"<html>|scores|nan for row of copy cat"):
        server.rewards(retries=5)
    assert len(server.requests) == 1, "an answer that is wrong will be wrong again"
