"""Dialects of servers: recognised by themselves, and scored right.

Small servers answer here as the documentation of the real ones says. `test_served.py` runs a real
vLLM, `tests/delivery/test_gguf.py` a real llama.cpp. Never run for real: SGLang.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.verify.dialects import connect
from tasks.verify.server import (
    SAMPLED,
    Scores,
    Server,
    ServerError,
    UnsupportedError,
    score,
)
from tests.answering import answering
from tests.verify import toy

SEQUENCES = [[1, 2, 3, 0, 2, 1], [0, 1], [3] * 20, [7, 1, 2], [5, 0, 4, 1, 6]]
CHAT = [{"role": "user", "content": "ab"}]
RENDERED = (4, 0, 1, 6)


def check(scores: list[Scores], *, most: int = 9, positions: int = 99, model: int = 0) -> None:
    """Compare scores with the model's own numbers; 5 to `most` are alternatives."""
    for sequence, scored in zip(SEQUENCES, scores, strict=True):
        measured = [at for at, entry in enumerate(scored) if len(entry.ids)]
        assert len(measured) == min(positions, len(sequence) - 1)
        for at in measured:
            ids, values = scored[at]
            assert np.allclose(values, toy.logprobs(sequence[: at + 1], model)[ids], atol=1e-6)
            assert np.all(np.diff(values) <= 0)
            assert 5 <= len(ids) == len(set(ids.tolist())) <= most


def greedy_is_right(server: Server, name: str) -> None:
    expected = toy.greedy([1, 2], 6)
    (made,) = server.generate(name, [1, 2], 6, temperature=0)
    assert (made.text, list(made.ids or ())) == (toy.text(expected), expected)
    assert made.prompt_length == 2
    assert len(server.generate(name, [1, 2], 2, 3)) == 3


def test_vllm_is_recognised_and_its_limit_of_log_probabilities_is_kept() -> None:
    with answering(toy.openai()) as requests:
        server = connect(requests.url)
        assert (server.kind, server.version) == ("vllm", "0.32.0")
        assert server.tokenize("base", "ab") == (0, 1)
        assert server.render("base", CHAT) == RENDERED
        greedy = server.generate("base", [1, 2], 6, temperature=0)
        (streamed,) = server.generate("base", [1, 2], 6, stream=True, temperature=0)
        assert (streamed.ids, streamed.text) == (greedy[0].ids, toy.text(toy.greedy([1, 2], 6)))
        check(server.score("tuned", SEQUENCES), most=6, model=1)
        bodies = requests.bodies("/v1/completions")[-len(SEQUENCES) :]
        with pytest.raises(ServerError, match="tuend"):
            server.score("tuend", [[1, 2]])
        with pytest.raises(ServerError) as caught:
            server.score("base", [[1] * 64])
        assert caught.value.code == "length"
    assert {(body["prompt_logprobs"], body["model"]) for body in bodies} == {(5, "tuned")}


@pytest.mark.parametrize(
    "listed", [[{"1": {"logprob": value}}] for value in (12.5, float("nan"), "x")] + [[], [{}, {}]]
)
def test_what_is_no_log_probability_of_each_token_is_refused(listed: list[Any]) -> None:
    """A prompt that a proxy cut, or to which a server added a token, is no other model."""
    answers = toy.openai()
    ok = answers["/v1/completions"]

    def broken(body: Any) -> Any:
        if len(body["prompt"]) == 2:
            return {"choices": [{"prompt_logprobs": [None, *listed]}]}
        return ok(body)

    with answering({**answers, "/v1/completions": broken}) as requests:
        server = connect(requests.url)
        with pytest.raises(ServerError) as caught:
            server.score("base", [[0, 1]])
    assert caught.value.code == "response"


def test_servers_with_fewer_fields_score_a_sample_of_positions_or_say_so() -> None:
    with answering(toy.openai(("logprobs", "ids"))) as requests:
        check(score(connect(requests.url), "base", SEQUENCES), positions=SAMPLED)
    with answering(toy.openai(())) as requests:
        server = connect(requests.url)
        with pytest.raises(UnsupportedError):
            score(server, "base", SEQUENCES)
        with pytest.raises(UnsupportedError):
            server.render("base", CHAT)


def test_llama_cpp_scores_next_tokens() -> None:
    with answering(toy.llama_cpp()) as requests:
        server = connect(requests.url)
        assert (server.kind, server.version) == ("llama.cpp", "b11434-abc")
        (model,) = server.models()
        assert (model.name, model.max_length) == ("toy.gguf", 64)
        check(score(server, model.name, SEQUENCES), positions=SAMPLED)
        greedy_is_right(server, model.name)
        with pytest.raises(UnsupportedError):
            server.generate(model.name, [1, 2], 6, stream=True)
        assert server.tokenize(model.name, "ab<user>") == (7, 0, 1, 4)
        assert server.render(model.name, CHAT) == (7, *RENDERED)  # this one adds BOS


def test_sglang_scores_prompts_and_adapters() -> None:
    with answering(toy.sglang()) as requests:
        server = connect(requests.url)
        assert (server.kind, server.version) == ("sglang", "0.5.9")
        check(server.score("toy", SEQUENCES))
        check(server.score("tuned", SEQUENCES), model=1)
        assert [body.get("lora_path") for body in requests.bodies("/generate")][-1] == "tuned"
        (entry,) = server.next("toy", [[1, 2]])
        assert entry.ids[0] == toy.logprobs([1, 2]).argmax()
        greedy_is_right(server, "toy")
        assert server.tokenize("toy", "ab") == (7, 0, 1)
        assert server.generate("toy", CHAT, 1)[0].prompt_length == len(RENDERED)
        server.generate("tuned", CHAT, 1)
        chats = requests.bodies("/v1/chat/completions")
        assert [body.get("lora_path") for body in chats][-2:] == [None, "tuned"]
        with pytest.raises(UnsupportedError):
            server.render("toy", CHAT)
