"""Chat templates and environments that cannot be used: every error names prompt and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.errors import ConfigError, RewardError
from tasks.rl.environment.observation_tokens import ObservationTokens
from tests.rl.environment.playing import END, GAME, PROMPTS, Open, Player, play, prompt_of
from tests.training.conftest import make_tokenizer

SAYS = "<|im_start|>{{ m.role }}\n"
ENDS = "<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BREAKING = {
    "rewrites a response": "{% for m in messages %}" + SAYS
    + "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}" + ENDS + ASKS,
    "rewrites a message": "{% for m in messages %}" + SAYS
    + "{{ m.content }}{% if loop.length > 4 and loop.first %} (long){% endif %}" + ENDS + ASKS,
    "leaves the prompt out": "{% for m in messages %}{% if loop.last or m.role == 'assistant' %}"
    + SAYS + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n",
    "rejects a tool": "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}" + SAYS + "{{ m.content }}" + ENDS
    + "<|im_start|>assistant\n",
    "does not end a response": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "assistant: ",
}  # fmt: skip
"""Chat templates that cannot be used for several turns."""


@pytest.mark.parametrize("name", BREAKING)
def test_templates_that_rewrite_a_conversation_are_refused(name: str) -> None:
    tokenizer = make_tokenizer()
    role = "tool" if "tool" in name else "user"
    ObservationTokens(tokenizer, [END], role).require_stable(prompt_of("question", tokenizer))
    tokenizer.chat_template = BREAKING[name]
    with pytest.raises(ConfigError) as caught:
        ObservationTokens(tokenizer, [END], role).require_stable(prompt_of("question", tokenizer))
    assert "data.chat_template=" in caught.value.hint


STEP = "class Game:\n    def reset(self): ...\n    def step(self, text): return "


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (STEP + "1 / 0", "step.*ZeroDivisionError"),
        (STEP + "exit(3)", "step.*SystemExit: 3"),
        (STEP + "('', float('nan'), True)", "reward=nan"),
        (STEP + "('', 1.0, 1)", "done=1"),
        (STEP + "(None, 1.0, False)", "goes on"),
        (STEP + "(['a'], 1.0, True)", r"observation=\['a'\]"),
        ("class Game:\n    def step(self, text): ...\n    def reset(self): return 7", "reset.*7"),
        ("class Game:\n    def reset(self, gold): ...\n    def step(self, text): ...",
         "reset.*gold.*id, messages"),
    ],
)  # fmt: skip
def test_faults_of_an_environment_name_the_prompt(opened: Open, text: str, named: str) -> None:
    with pytest.raises(RewardError, match=named) as caught:
        play(PROMPTS[:2], Player(), opened(text))
    assert "game.py:Game" in caught.value.message
    assert caught.value.details[:2] == ("row: p0", "prompt: 'p0'")
    if "step" in caught.value.message:
        assert "response: '0-0'" in caught.value.details
        assert not any("environment/child.py" in line for line in caught.value.details)


def test_an_environment_that_dies_names_the_prompt(opened: Open) -> None:
    game = f"import os\n{GAME}".replace("self.turns += 1", "self.end == 2 and os._exit(9)")
    with pytest.raises(RewardError, match="status 9") as caught:
        play(PROMPTS[:3], Player(), opened(game))
    assert "prompt: 'p1'" in caught.value.details


def test_a_coroutine_that_waits_too_long_names_its_own_prompt(opened: Open) -> None:
    waits = "await asyncio.sleep(1000 if self.end == 2 else 0)"
    game = f"import asyncio\n{GAME}".replace("self.turns += 1", waits)
    with pytest.raises(RewardError, match="2 s.*p1") as caught:
        play(PROMPTS[:3], Player(), opened(game, timeout_s=2.0))
    assert "rl.environment_timeout_s" in caught.value.hint


def test_environments_that_cannot_be_used_are_refused_before_the_first_rollout(
    opened: Open,
) -> None:
    """Most of them without running the file."""
    half = "class Game:\n    def reset(self): ..."
    for text in ("def Game(): ...", half, "class Other: ..."):
        with pytest.raises(ConfigError, match="Game"):
            opened(text)
    for text, named in (
        (half.replace("Game", "Game(Base)").replace("class", "class Base: ...\nclass", 1), "step"),
        ("Game = 3", "Game"),
        ("import nothing_of_this_name\nclass Game:\n    reset = step = print", "nothing_of_this"),
    ):
        with pytest.raises(RewardError, match=named):
            opened(text).load()


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
    with pytest.raises(RewardError, match="close.*ZeroDivisionError.*p1"):
        play(PROMPTS[1:2], Player(), opened(game.replace(write, "1 / 0")))
