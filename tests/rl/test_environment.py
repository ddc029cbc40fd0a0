"""Episodes of several turns: token layout, limits, ranks, templates, faults of an environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.core.errors import ConfigError, RewardError
from tasks.rl.advantages import estimate
from tasks.rl.collect import Collector
from tasks.rl.environment import EnvironmentProcess, ObservationTokens
from tasks.rl.experience import Experience, pack_experience
from tasks.rl.metrics import Clock
from tasks.rl.responses import PromptOrder, Request
from tasks.rl.rewards import Rewards
from tasks.rl.user_code import FunctionReference
from tasks.serving.vllm.colocation import Generated
from tasks.toy.pretrain import train_tokenizer
from tests.rl.making import (
    END,
    GAME,
    LOG,
    PROMPTS,
    TOKENIZER,
    Open,
    Player,
    episodes,
    judge,
    on_ranks,
    play,
    prompt_of,
    rendered,
    scored,
)
from tests.settings import Loop
from tests.tiny import make_tokenizer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> FunctionReference:
    """The environment `GAME`."""
    path = tmp_path_factory.mktemp("game") / "game.py"
    path.write_text(GAME)
    return FunctionReference.of(f"{path}:Game", "rl.environment")


@pytest.fixture(scope="module")
def game(reference: FunctionReference) -> Iterator[EnvironmentProcess]:
    """One process of `GAME`."""
    log_path = reference.path.with_name("log")
    with closing(EnvironmentProcess(reference, timeout_s=60, log=LOG, log_path=log_path)) as made:
        yield made


def test_the_context_is_what_a_server_renders(game: EnvironmentProcess) -> None:
    """Prompt, responses and observations once each; marks on the sampled tokens alone."""
    role = "tool"
    responses = play(PROMPTS[:3], Player(lambda r: "hello"), game, role=role)
    assert [len(response.turns) for response in responses] == [1, 2, 3]
    for response in responses:
        assert response.ids.tolist() == rendered(response)
        assert response.done
        assert response.generated.ended
        sampled = response.ids[response.marks.astype(bool)]
        assert sampled.tolist() == response.generated.ids.tolist()
        assert TOKENIZER.decode(sampled) == "hello<|im_end|>" * len(response.turns)
    written = TOKENIZER.decode(responses[1].ids)
    assert written.endswith(
        f"<|im_start|>{role}\nturn 1: hello<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"
    )
    observed = TOKENIZER.decode(responses[1].ids[responses[1].marks == 0])
    assert observed.endswith(
        f"\n<|im_start|>{role}\nturn 1: hello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [turn.reward for turn in responses[2].turns] == [0.25, 0.25, 1.0]
    experience = pack_experience(scored(responses))
    assert experience.lengths.tolist() == [len(r.generated.ids) for r in responses]
    assert experience.turn_rewards is not None
    rewards = experience.turn_rewards[experience.turn_rewards > 0].tolist()
    assert rewards == [1, 0.25, 1, 0.25, 0.25, 1]
    row, sampled = experience.row([2, 0, 1]), [responses[n].generated.ids for n in (2, 0, 1)]
    assert row.targets.tolist() == np.concatenate(sampled).tolist(), "observations bear no loss"


def test_sampled_tokens_are_never_tokenised_again(game: EnvironmentProcess) -> None:
    """The policy spells a word in single letters, for which the tokenizer has one token."""
    tokenizer = train_tokenizer(["hello hello hello turn p1"] * 50, context=64)
    letters = [i for c in "hello" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    sampled = np.array([*letters, tokenizer.eos_token_id], np.int32)

    class Speller(Player):
        def _response(self, request: Request) -> Generated:
            return Generated(sampled, np.zeros(len(sampled), np.float32), True)

    (response,) = play([prompt_of("p1", tokenizer)], Speller(), game, tokenizer=tokenizer)
    assert [turn.text for turn in response.turns] == ["hello"] * 2
    assert response.generated.ids.tolist() == [*sampled, *sampled]
    again = tokenizer(tokenizer.decode(response.ids), add_special_tokens=False)["input_ids"]
    assert len(again) < len(response.ids)


def test_the_budget_counts_sampled_and_observed_tokens(game: EnvironmentProcess) -> None:
    for budget, turns, why in (
        (3, 1, "the token limit cuts the first response, which the environment still gets"),
        (6, 1, "the observation does not fit"),
        (39, 1, "no room for a token after the observation"),
        (40, 2, "a single token fits"),
        (45, 2, "the second response ends the episode: its observation does not fit"),
    ):
        engine = Player(lambda r: "hello", limit=budget)
        (response,) = play([PROMPTS[2]], engine, game, budget=budget)
        assert len(response.turns) == turns, why
        assert (response.done, response.generated.ended) == (False, False)
        assert len(response.ids) - len(response.prompt.ids) <= budget
        assert response.turns[-1].reward == 0.25
        assert response.turns[-1].observation is None
        assert not len(response.turns[-1].ids)


def test_advantages_run_over_the_sampled_tokens_of_all_turns() -> None:
    """By hand: two turns of 2 and 1 tokens with rewards 1 and 2, and 4 from another source."""
    values = torch.tensor([0.5, 1.0, 2.0])
    batch = Experience(
        lengths=torch.tensor([3]),
        groups=torch.tensor([0]),
        rewards=torch.tensor([7.0]),
        truncated=torch.tensor([False]),
        sampled=torch.zeros(3),
        values=values,
        turn_rewards=torch.tensor([0.0, 1.0, 2.0]),
    )
    loop = Loop(gamma=0.5, gae_lambda=0.5)
    # The value of the second turn's token has read the observation.
    surprises = [0 + 0.5 * 1 - 0.5, 1 + 0.5 * 2 - 1, 2 + 4 - 2]
    wanted = [surprises[0] + 0.25 * surprises[1] + 0.0625 * surprises[2],
              surprises[1] + 0.25 * surprises[2], surprises[2]]  # fmt: skip
    advantages, critics = estimate("gae", batch, loop)
    torch.testing.assert_close(advantages, torch.tensor(wanted))
    torch.testing.assert_close(critics, torch.tensor(wanted) + values)
    returns = torch.tensor([0 + 0.5 * (1 + 0.5 * 6), 1 + 0.5 * 6, 6.0])
    whitened = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(estimate("returns", batch, loop)[0], whitened)


def test_episodes_do_not_depend_on_the_rank(reference: FunctionReference, tmp_path: Path) -> None:
    """Ranks with short or no episodes take part in as many calls of the engine as the others."""

    def work(ranks: Any) -> tuple[list[Any], int]:
        engine: Any = Player()
        how: Any = {"timeout_s": 60, "log": LOG, "log_path": tmp_path / f"log-{ranks.rank}"}
        with closing(EnvironmentProcess(reference, **how)) as process:
            played = episodes(engine, process, ranks=ranks)
            rewards = Rewards([judge(lambda r: len(r.messages))])
            collector = Collector(engine, rewards, PROMPTS, TOKENIZER, ranks, 3, played)
            order = PromptOrder(len(PROMPTS), 3, 0, seed=1)
            known, _ = collector.collect(1, order, 0, 2, Clock())
        told = [(s.group, s.reward, dict(s.parts), s.ids.tolist(), s.messages) for s in known]
        return told, len(engine.seen)

    ((alone, calls),) = on_ranks(1, work)
    assert calls == 3
    assert {len(messages) for *_, messages in alone} == {1, 3, 5}
    for _, reward, parts, *_ in alone:
        assert reward == 2 * parts["function"] + parts["environment"]
    for known, count in on_ranks(4, work):  # one has no prompt
        assert known == alone
        assert count == calls


SAYS = "<|im_start|>{{ m.role }}\n"
ENDS = "<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BREAKING = {
    "rewrites a response": "{% for m in messages %}" + SAYS
    + "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}" + ENDS + ASKS,
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
        (STEP + "('', float('nan'), True)", "nan"),
        (STEP + "(None, 1.0, False)", "None, 1.0, False"),
        ("class Game:\n    def step(self, text): ...\n    def reset(self): return 7", "reset.*7"),
        ("class Game:\n    def reset(self, gold): ...\n    def step(self, text): ...",
         "reset.*gold.*id, messages"),
    ],
)  # fmt: skip
def test_faults_of_an_environment_name_the_prompt(opened: Open, text: str, named: str) -> None:
    with pytest.raises(RewardError, match=named) as caught:
        play(PROMPTS[:2], Player(), opened(text))
    assert "judge.py:Game" in caught.value.message
    assert caught.value.details[:2] == ("row: p0", "prompt: 'p0'")
    if "step" in caught.value.message:
        assert "response: '0-0'" in caught.value.details
        assert not any("user_code.py" in line for line in caught.value.details)


@pytest.mark.parametrize(("kind", "sleep"), [("async def", "await asyncio"), ("def", "time")])
def test_an_episode_that_hangs_is_named(opened: Open, kind: str, sleep: str) -> None:
    game = f"""
import asyncio, time
class Game:
    def reset(self, id):
        self.id = id
    {kind} step(self, text):
        {sleep}.sleep(1000 * (self.id == 'p1'))
        return None, 1.0, True
"""
    with pytest.raises(RewardError, match="step for p1.*2 s") as caught:
        play(PROMPTS[:3], Player(), opened(game, timeout_s=2.0))
    assert caught.value.details[:3] == ("row: p1", "prompt: 'p1'", "response: '7-0'")
    assert "rl.environment_timeout_s" in caught.value.hint
