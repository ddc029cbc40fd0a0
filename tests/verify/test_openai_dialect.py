"""vLLM and other servers of the OpenAI dialect, as their documentation says that they answer.

Here a small server answers so; `test_real_servers.py` asks real ones. Not run against the real
server: generic servers with `echo`, and those that tell the next tokens only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.verify.servers.connect import connect
from tasks.verify.servers.server import Abilities, Scores, ServerError, UnsupportedError
from tests.verify import toy_model as toy
from tests.verify.answering import Answer, answering, refusal

SEQUENCES = [[1, 2, 3, 0, 2, 1], [0, 1], [3] * 20]
CHAT = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]


def cards(owner: str) -> dict[str, Any]:
    adapter = {"id": "tuned", "parent": "base", "root": "/adapters/tuned", "owned_by": owner}
    base = {"id": "base", "root": "/models/base", "max_model_len": 64, "owned_by": owner}
    return {"data": [adapter, base]}


def chosen(body: dict[str, Any], limit: int, fields: set[str]) -> Any:
    """Return the response to a request for completions, or a refusal."""
    if body["model"] not in ("base", "tuned"):
        return refusal(404, f"The model `{body['model']}` does not exist.")
    for field in ("prompt_logprobs", "logprobs"):
        if body.get(field, 0) > limit:
            name = "prompt" if field == "prompt_logprobs" else "sample"
            message = f"Requested {name} logprobs of {body[field]}, which is greater than max "
            return refusal(400, f"{message}allowed: {limit}")
    prompt = body.get("prompt") or toy.rendered(body["messages"])
    if len(prompt) + body["max_tokens"] > 64:
        return refusal(400, "This model's maximum context length is 64 tokens.")
    ids = toy.greedy(prompt, body["max_tokens"])
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if toy.EOS in ids else "length"}
    if "prompt" in body:
        choice["text"] = toy.text(ids)
    else:
        choice["message"] = {"role": "assistant", "content": toy.text(ids)}
    if "prompt_logprobs" in fields and "prompt_logprobs" in body:
        choice["prompt_logprobs"] = [None] + [
            {
                str(token): {"logprob": value, "rank": 1, "decoded_token": "?"}
                for token, value in toy.tops(prompt[:at], body["prompt_logprobs"], own).items()
            }
            for at, own in enumerate(prompt)
            if at
        ]
    if body.get("logprobs") is not None and "logprobs" in fields:
        name = "token_id:{}" if "ids" in fields else "<{}>"
        scored = [*prompt, *ids] if body.get("echo") and "echo" in fields else ids
        before = len(prompt) - (len(scored) - len(ids))
        places = [([*prompt, *ids][: before + at], own) for at, own in enumerate(scored)]
        tops = [toy.tops(p, body["logprobs"], own) if p else None for p, own in places]
        choice["logprobs"] = {
            "tokens": [name.format(own) for own in scored],
            "token_logprobs": [t and t[own] for t, (_, own) in zip(tops, places, strict=True)],
            "top_logprobs": [t and {name.format(i): v for i, v in t.items()} for t in tops],
        }
    answer: dict[str, Any] = {"choices": [choice]}
    if body.get("return_token_ids") and "return_token_ids" in fields:
        choice["token_ids"] = ids
        (choice if "prompt" in body else answer)["prompt_token_ids"] = prompt
    if body.get("stream"):
        return iter(parts(choice, answer))
    return answer


def parts(choice: dict[str, Any], answer: dict[str, Any]) -> Any:
    """Yield a response token by token."""
    for token in choice["token_ids"]:
        yield {"choices": [{"index": 0, "text": toy.text([token]), "token_ids": [token]}]}
    yield {"choices": [{"index": 0, "text": "", "finish_reason": choice["finish_reason"]}]}


def vllm(limit: int = 5) -> dict[str, Answer]:
    """Return the answers of `vllm serve`, 0.32."""
    fields = {"prompt_logprobs", "logprobs", "echo", "ids", "return_token_ids"}

    def tokenize(body: Any) -> Any:
        ids = toy.tokens(body["prompt"]) if "prompt" in body else toy.rendered(body["messages"])
        if body.get("add_special_tokens"):
            ids = [7, *ids]
        return {"count": len(ids), "max_model_len": 64, "tokens": ids}

    return {
        "/v1/models": lambda _: cards("vllm"),
        "/version": lambda _: {"version": "0.32.0"},
        "/v1/completions": lambda body: chosen(body, limit, fields),
        "/v1/chat/completions": lambda body: chosen(body, limit, fields),
        "/tokenize": tokenize,
    }


def generic(*fields: str) -> dict[str, Answer]:
    """Return the answers of another server."""
    return {
        "/v1/models": lambda _: cards("somebody"),
        "/v1/completions": lambda body: chosen(body, 5, set(fields)),
        "/v1/chat/completions": lambda body: chosen(body, 5, set(fields)),
    }


def check(scores: list[Scores], *, alternatives: int, positions: int | None = None) -> None:
    """Compare scores with the model's own numbers."""
    for sequence, scored in zip(SEQUENCES, scores, strict=True):
        measured = 0
        for at, (ids, values) in enumerate(zip(scored.ids, scored.logprobs, strict=True)):
            if not len(ids):
                continue
            measured += 1
            expected = toy.logprobs(sequence[: at + 1])
            assert np.allclose(values, expected[ids], atol=1e-6)
            assert np.all(np.diff(values) <= 0)
            assert alternatives <= len(ids) <= alternatives + 1
            assert len(set(ids.tolist())) == len(ids)
        wanted = len(sequence) - 1
        assert measured == (wanted if positions is None else min(wanted, positions))


def test_vllm_is_recognised_and_its_limit_of_log_probabilities_is_kept() -> None:
    with answering(vllm(limit=5)) as requests:
        server = connect(requests.url)
        assert (server.kind, server.version) == ("vllm", "0.32.0")
        assert server.abilities == Abilities(True, 5, 5, True, True)
        check(server.score("tuned", SEQUENCES), alternatives=5)
        bodies = requests.bodies("/v1/completions")
    assert [body["prompt_logprobs"] for body in bodies[-3:]] == [5, 5, 5]
    assert {body["model"] for body in bodies[-3:]} == {"tuned"}


def test_a_name_that_no_model_has_is_answered_with_the_names() -> None:
    with answering(vllm()) as requests:
        server = connect(requests.url)
        for call in (lambda: server.score("tuend", [[1, 2]]), lambda: server.render("tuend", CHAT)):
            with pytest.raises(ServerError, match="serves no model 'tuend'") as caught:
                call()
            assert caught.value.code == "model"
            assert "base, tuned" in caught.value.report()


def test_a_sequence_beyond_the_context_has_its_own_code() -> None:
    with answering(vllm()) as requests, pytest.raises(ServerError) as caught:
        connect(requests.url).score("base", [[1] * 64])
    assert caught.value.code == "length"


def test_a_proxy_that_hides_the_tokeniser_is_no_error() -> None:
    answers = vllm()
    del answers["/tokenize"]
    with answering(answers) as requests:
        server = connect(requests.url)
        assert server.abilities == Abilities(True, 5, 5, False, True)
        with pytest.raises(UnsupportedError):
            server.tokenize("base", "a")


def test_echo_with_texts_for_tokens_scores_the_sequence_itself() -> None:
    with answering(generic("logprobs", "echo")) as requests:
        server = connect(requests.url)
        assert server.abilities == Abilities(True, 1, 0, False, False)
        scores = server.score("base", SEQUENCES)
    for sequence, scored in zip(SEQUENCES, scores, strict=True):
        assert [ids.tolist() for ids in scored.ids] == [[token] for token in sequence[1:]]
    check(scores, alternatives=1)


def test_tokens_as_texts_are_found_in_the_vocabulary_of_the_training(tmp_path: Path) -> None:
    vocabulary = {f"<{token}>": token for token in range(toy.SIZE)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    for fields in (("logprobs", "echo"), ("logprobs",)):
        with answering(generic(*fields)) as requests:
            server = connect(requests.url, tokenizer=tmp_path)
            assert server.abilities.next_logprobs == 5
            positions = None if "echo" in fields else 12
            check(server.score("base", SEQUENCES), alternatives=5, positions=positions)


def test_a_server_that_refuses_unknown_fields_is_asked_without_them() -> None:
    answers = generic("logprobs", "echo")
    answer = answers["/v1/completions"]

    def strict(body: Any) -> Any:
        for name in ("prompt_logprobs", "return_tokens_as_token_ids"):
            if name in body:
                return refusal(400, f"Unrecognized request argument supplied: {name}")
        return answer(body)

    with answering({**answers, "/v1/completions": strict}) as requests:
        server = connect(requests.url)
        assert server.abilities == Abilities(True, 1, 0, False, False)
        check(server.score("base", SEQUENCES), alternatives=1)


def test_next_tokens_score_a_sample_of_positions() -> None:
    with answering(generic("logprobs", "ids")) as requests:
        server = connect(requests.url)
        assert server.abilities == Abilities(True, 0, 5, False, False)
        check(server.score("base", SEQUENCES), alternatives=5, positions=12)


def test_a_server_without_log_probabilities_says_so() -> None:
    with answering(generic()) as requests:
        server = connect(requests.url)
        assert server.abilities == Abilities(True, 0, 0, False, False)
        with pytest.raises(UnsupportedError, match="no log-probabilities"):
            server.score("base", SEQUENCES)


@pytest.mark.parametrize("value", [12.5, float("nan"), "x"])
def test_values_that_are_no_log_probabilities_are_refused(value: Any) -> None:
    answers = vllm()
    place = {"1": {"logprob": value}}
    ok = answers["/v1/completions"]

    def broken(body: Any) -> Any:
        if len(body["prompt"]) == 2:
            return {"choices": [{"prompt_logprobs": [None, place]}]}
        return ok(body)

    with answering({**answers, "/v1/completions": broken}) as requests:
        server = connect(requests.url)
        with pytest.raises(ServerError) as caught:
            server.score("base", [[0, 1]])
    assert caught.value.code == "response"


def test_a_page_that_is_no_server_is_refused() -> None:
    with answering({"/": lambda _: {}}) as requests, pytest.raises(ServerError) as caught:
        connect(requests.url)
    assert "no /v1/models" in caught.value.message
