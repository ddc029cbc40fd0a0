"""Chat templates and environments that cannot be used: every error names prompt and remedy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tasks.core.errors import ConfigError, RewardError
from tasks.rl.environment.observation_tokens import ObservationTokens
from tests.rl.environment.playing import END, GAME, PROMPTS, Open, Player, play, prompt_of

BREAKING = {
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}":
        "it rewrites an earlier response: '<think>",
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.length > 4 and loop.first %} (long){% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}":
        "it rewrites earlier messages when the conversation goes on",
    "{% for m in messages %}{% if loop.last or m.role == 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n":
        "it renders the prompt differently when the conversation goes on",
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n":
        "it rejects a message of role 'tool': no such role",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ":
        "no token that ends a response",
}  # fmt: skip
"""Chat templates that cannot be used for several turns, with the reason."""


@pytest.mark.parametrize("template", BREAKING, ids=BREAKING.values())
def test_templates_that_rewrite_a_conversation_are_refused(template: str) -> None:
    from tests.training.conftest import make_tokenizer

    tokenizer = make_tokenizer()
    prompt = prompt_of("question", tokenizer)
    role = "tool" if "role 'tool'" in BREAKING[template] else "user"
    ObservationTokens(tokenizer, [END], role).require_stable(prompt)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError) as caught:
        ObservationTokens(tokenizer, [END], role).require_stable(prompt_of("question", tokenizer))
    assert BREAKING[template] in caught.value.message
    assert "data.chat_template=" in caught.value.hint


STEP = "class Game:\n    def reset(self): ...\n    def step(self, text): return "


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (STEP + "1 / 0", "step failed: ZeroDivisionError: division by zero, for p0: 'p0'", ""),
        (STEP + "exit(3)", "step failed: SystemExit: 3, for p0", ""),
        (STEP + "'ok'", "step returned 'ok', not three values, for p0: 'p0'", "return observation"),
        (STEP + "('', float('nan'), True)", "returned reward=nan, not a finite", "finite number"),
        (STEP + "('', 10 ** 400, True)", "returned reward=1000", "finite number"),
        (STEP + "('', '1', True)", "returned reward='1', not a finite number", "finite number"),
        (STEP + "('', 1.0, 1)", "returned done=1, not True or False", "True or False"),
        (STEP + "(None, 1.0, False)", "a text, although the episode goes on", "a text"),
        (STEP + "(['a'], 1.0, True)", "observation=['a'], not a text or None", "a text"),
        ("class Game:\n    def reset(self): return 'x'\n    def step(self, text): ...",
         "reset returned 'x', for p0", "the first message is the prompt of the data"),
        ("class Game:\n    def reset(self, gold): ...\n    def step(self, text): ...",
         "reset failed: it needs gold; available are id, messages, prompt, seed, for p0", "column"),
    ],
)  # fmt: skip
def test_faults_of_an_environment_name_the_prompt(
    opened: Open, text: str, message: str, hint: str
) -> None:
    with pytest.raises(RewardError) as caught:
        play(PROMPTS[:2], Player(), opened(text))
    assert message in caught.value.message
    assert "game.py:Game" in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.details[:2] == ("row: p0", "prompt: 'p0'")
    if "step" in message:
        assert "response: '0-0'" in caught.value.details
        assert not any("environment/child.py" in line for line in caught.value.details)


def test_the_failing_episode_is_named(opened: Open) -> None:
    game = GAME.replace("self.turns += 1", "self.turns += 1 + (self.turns // (self.end - 3))")
    with pytest.raises(RewardError, match=r"ZeroDivisionError.*, for p2: 'p2'") as caught:
        play(PROMPTS[:3], Player(), opened(game))
    assert any("self.turns // (self.end - 3)" in line for line in caught.value.details)


@pytest.mark.parametrize("how", ["time.sleep(1000)", "os._exit(9)"])
def test_an_environment_that_hangs_or_dies_names_the_prompt(opened: Open, how: str) -> None:
    game = f"import os, time\n{GAME}".replace("self.turns += 1", f"self.end == 2 and {how}")
    process = opened(game, timeout_s=3.0)
    process.load()
    began = time.monotonic()
    with pytest.raises(RewardError) as caught:
        play(PROMPTS[:3], Player(), process)
    assert time.monotonic() - began < 60
    what = "took more than 3 s" if "sleep" in how else "ended its process (status 9)"
    assert f"{what} in step for p1: 'p1'" in caught.value.message
    assert "prompt: 'p1'" in caught.value.details
    assert ("rl.environment_timeout_s=<more>" in caught.value.hint) == ("sleep" in how)


def test_a_coroutine_that_waits_too_long_names_its_own_prompt(opened: Open) -> None:
    waits = "await asyncio.sleep(1000 if self.end == 2 else 0)"
    game = f"import asyncio\n{GAME}".replace("self.turns += 1", waits)
    with pytest.raises(RewardError, match=r"took more than 2 s, for p1: 'p1'") as caught:
        play(PROMPTS[:3], Player(), opened(game, timeout_s=2.0))
    assert "rl.environment_timeout_s=<more>" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def Game(): ...", "Game is a function, not a class"),
        ("class Game:\n    def reset(self): ...", "class Game has no method step"),
        ("class Other: ...", "no 'Game' in the file, which has Other"),
    ],
)
def test_what_is_no_environment_is_refused_without_running_it(
    opened: Open, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(text)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Base: ...\nclass Game(Base):\n    def reset(self): ...", "has no method step"),
        ("Game = 3", "'Game' is not callable but int"),
        ("import nothing_of_this_name\nclass Game:\n    reset = step = print", "nothing_of_this"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_the_first_rollout(
    opened: Open, text: str, message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        opened(text).load()
    assert message in caught.value.message


def test_environments_close_and_several_episodes_do_not_mix(opened: Open, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    write = f"open({str(closed)!r}, 'a').write(str(self.end))"
    game = f"{GAME}\n    def close(self):\n        {write}\n"
    process = opened(game)
    responses = play(PROMPTS[:3], Player(), process)
    assert closed.read_text() == "123"
    assert [len(response.turns) for response in responses] == [1, 2, 3]
    responses = play(PROMPTS[1:3], Player(), process)
    assert closed.read_text() == "12323"
    assert [len(response.turns) for response in responses] == [2, 3], "no state is left"
    with pytest.raises(RewardError, match=r"close failed: ZeroDivisionError.*, for p1: 'p1'"):
        play(PROMPTS[1:2], Player(), opened(game.replace(write, "1 / 0")))
