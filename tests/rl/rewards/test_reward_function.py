"""A user's reward function: its interface, and its possible faults."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.core.errors import ConfigError, RewardError
from tasks.rl.rewards.function import Function
from tasks.rl.rewards.reference import FunctionReference
from tests.rl.making import response, responses

LOG = logging.getLogger("tests.rl")
Make = Callable[..., Function]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Make]:
    """Return a factory that writes a file and opens the function `score` in it."""
    opened: list[Function] = []

    def make(text: str, name: str = "score", *, timeout_s: float = 60.0) -> Function:
        path = tmp_path / "judge.py"
        path.write_text(text)
        reference = FunctionReference.of(f"{path}:{name}")
        function = Function(
            reference, timeout_s=timeout_s, log=LOG, log_path=tmp_path / "output.log"
        )
        opened.append(function)
        return function

    yield make
    for function in opened:
        function.close()


def is_alive(path: Path) -> bool:
    """Return True if the process whose id is in a file still runs."""
    return Path(f"/proc/{path.read_text()}").exists()


def test_it_gets_the_arguments_of_trl_and_every_column(made: Make) -> None:
    score = made(
        """
import json

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
"""
    )
    score.load()
    assert score(responses(level=3, completion="of the data")) == [4.0] * 4
    assert score(responses(level=5)) == [6.0] * 4
    answered = [{"role": "user", "content": "copy ape"}, {"role": "assistant", "content": "ape"}]
    score = made("def score(prompts):\n    return [len(p) for p in prompts]")
    assert score([response("copy ape", "ape", messages=answered)]) == [1.0], "without the answer"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("async def score(answer):\n    return [len(a) for a in answer]", [3, 6, 3, 26]),
        ("def score(answer, level=2):\n    return tuple(level for _ in answer)", [2, 2, 2, 2]),
        ("import numpy\n\ndef score(prompts):\n    return numpy.arange(4) < 2", [1, 1, 0, 0]),
        ("class Judge:\n    def __call__(self, **row):\n        return [0.5] * len(row['id'])\n"
         "score = Judge()", [0.5] * 4),
        ("from neighbour import score", [9, 9, 9, 9]),
    ],
)  # fmt: skip
def test_all_kinds_of_functions(
    made: Make, tmp_path: Path, text: str, expected: list[float]
) -> None:
    (tmp_path / "neighbour.py").write_text("def score(prompts):\n    return [9] * len(prompts)")
    assert made(text)(responses()) == expected


def test_it_runs_outside_of_the_ranks_and_keeps_its_state(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    score = made(
        """
import os, sys
calls = 0

def score(prompts):
    global calls
    calls += 1
    assert sys.stdin.read() == ""  # and not the next request
    ours = [name for name in os.environ if name.startswith(("RANK", "WORLD", "MASTER", "TORCHEL"))]
    return [calls + len(ours)] * len(prompts)
"""
    )
    assert [score(responses())[0] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_the_failing_response_is_named(made: Make) -> None:
    score = made("def score(answer):\n    return [1 / (len(a) - 6) for a in answer]")
    with pytest.raises(RewardError, match="ZeroDivisionError") as caught:
        score(responses())
    assert "row of copy beetle" in caught.value.message
    assert "judge.py:score" in caught.value.message
    assert "prompt: 'copy beetle'" in caught.value.details
    assert any("return [1 / (len(a) - 6)" in line for line in caught.value.details)
    assert not any("function_child" in line for line in caught.value.details)
    assert score([responses()[0]]) == [-1 / 3], "it goes on after an exception"
    score = made("def score(id):\n    if len(id) > 1:\n        raise SystemExit(7)\n    return [1]")
    with pytest.raises(RewardError, match="4 responses.*row of copy ape.*7"):  # no single one
        score(responses())


def test_a_function_that_hangs_is_killed_with_its_children(made: Make, tmp_path: Path) -> None:
    score = made(
        f"""
import os, re, subprocess
from pathlib import Path

def score(answer):
    if answer[0] == "ape":
        child = subprocess.Popen(["sleep", "1000"])
        Path({str(tmp_path / "grandchild")!r}).write_text(str(child.pid))
        Path({str(tmp_path / "child")!r}).write_text(str(os.getpid()))
        re.match("(a+)+$", "a" * 60 + "b")  # in C, with the interpreter's lock held
    return [1.0] * len(answer)
""",
        timeout_s=2.0,
    )
    score.load()
    began = time.monotonic()
    with pytest.raises(RewardError, match="2 s on 4 responses") as caught:
        score(responses())
    assert time.monotonic() - began < 60
    assert any("judge.py" in line and "in score" in line for line in caught.value.details)
    assert "reward.timeout_s" in caught.value.hint
    assert not is_alive(tmp_path / "child")
    assert not is_alive(tmp_path / "grandchild")
    assert score(responses()[1:]) == [1.0] * 3, "another process has taken its place"


def test_a_function_that_ends_its_process(made: Make) -> None:
    score = made(
        "import os\n\ndef score(answer):\n    print('farewell')\n"
        "    return [1] if len(answer) == 1 else os._exit(9)"
    )
    with pytest.raises(RewardError, match="status 9") as caught:
        score(responses())
    assert "farewell" in caught.value.details
    assert score(responses()[:1]) == [1.0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def score(answer):\n    return [None for _ in answer]", "None for row of copy ape"),
        ("def score(answer):\n    return [object() for _ in answer]", "object"),
        ("def score(answer):\n    return [1.0]", "1 rewards for 4"),
        ("def score(answer, gold):\n    return [1.0]", "gold.*completions"),
    ],
)
def test_invalid_return_values(made: Make, text: str, named: str) -> None:
    with pytest.raises(RewardError, match=named) as caught:
        made(text)(responses())
    assert "prompt: 'copy ape'" in caught.value.details


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import nothing_of_this_name\nscore = 1", "nothing_of_this_name"),
        ("score = 'abc'", "score.*str"),
        ("import time\ntime.sleep(1000)\ndef score(): ...", "2 s"),
    ],
)
def test_a_file_that_cannot_be_loaded(made: Make, text: str, named: str) -> None:
    with pytest.raises(RewardError, match=named):
        made(text, timeout_s=2.0 if "sleep" in text else 60.0).load()


def test_a_name_is_looked_up_without_running_the_file(tmp_path: Path) -> None:
    for text in ("judge", "judge.py", "judge:score", "judge.py:a.b", ":score"):
        with pytest.raises(ConfigError, match="path.py:name"):
            FunctionReference.of(text)
    path, digests = tmp_path / "judge.py", set()
    score = FunctionReference.of(f"{path}:score")
    with pytest.raises(ConfigError, match="judge.py"):
        score.require()
    good = (
        "async def score(): ...",
        "from functools import partial as score",
        "if 1:\n    a, (score, b) = 1, (2, 3)",
        "import score.path",
        "from os import *",  # only running it would tell
    )
    bad = (
        "def score(:",
        "def scores(): ...",
        "def a():\n    score = 1\nclass B:\n    def score(self): ...",
    )
    for text in (*good, *bad):
        path.write_text(text)
        digests.add(score.digest())
        if text in good:
            score.require()
        else:
            with pytest.raises(ConfigError, match="judge.py"):
                score.require()
    assert len(digests) == len({*good, *bad}), "the digest changes with the file"
