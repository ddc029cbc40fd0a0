"""Prompts, EOS and context: each planted difference is a fault and is named; equal ones are ok."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.drift.fingerprint import Fingerprint
from tasks.verify.answers import Answers
from tasks.verify.check import Check
from tasks.verify.checks.differences import difference
from tasks.verify.checks.ending import context, eos
from tasks.verify.checks.prompt import template, tokens
from tasks.verify.reference import Probe, Reference
from tasks.verify.servers.connect import connect
from tasks.witness.plumbline_witness.probes import CHATS, TEXTS
from tests.verify import toy_model as toy
from tests.verify.answering import Answer, answering, refusal
from tests.verify.test_openai_dialect import chosen, vllm

FIELDS = {"prompt_logprobs", "logprobs", "echo", "ids", "return_token_ids"}


def measured(probes: Sequence[Probe]) -> Fingerprint:
    """Return the toy model's log-probabilities of all tokens."""
    rows = [toy.logprobs(p.ids[:end]) for p in probes for end in range(1, len(p.ids))]
    logprobs = np.array(rows, np.float32)
    ids = np.tile(np.arange(toy.SIZE, dtype=np.int32), (len(rows), 1))
    sequences = tuple(p.ids for p in probes)
    return Fingerprint(sequences, ids, logprobs, logprobs.argmax(1).astype(np.int32), "toy")


def reference(**facts: Any) -> Reference:
    """Return what the toy model recorded: texts, conversations, and a turn that ends."""
    probes = [Probe(tuple(toy.tokens(t))[:64], "text", n, t) for n, t in enumerate(TEXTS)]
    for number, chat in enumerate(CHATS):
        messages = [{"role": role, "content": text} for role, text in chat]
        probes.append(Probe(tuple(toy.rendered(messages))[:64], "chat", number, "?"))
    special = {"eos_token_id": toy.EOS, "bos_token_id": None}
    facts = {"tokens": {"tokenizer": special}, **facts}
    return Reference(tuple(probes), measured(probes), None, facts)


def server(
    render: Callable[[Any], Any] = toy.rendered,
    split: Callable[[str], list[int]] = toy.tokens,
    *,
    ends: bool = True,
    length: int = 600,
    cut: int | None = None,
) -> dict[str, Answer]:
    """Return the answers of a vLLM server, with faults."""

    def generate(body: Any) -> Any:
        prompt = body.get("prompt") or render(body["messages"])
        if len(prompt) >= length:
            return refusal(400, f"This model's maximum context length is {length} tokens.")
        prompt = prompt[-cut:] if cut else prompt
        if bias := body.get("logit_bias"):
            ids = [int(next(iter(bias)))] * (1 if ends else body["max_tokens"])
        elif ends:
            ids = toy.greedy(prompt, body["max_tokens"])
        else:
            ids = [int(toy.logprobs(prompt).argmax())] * body["max_tokens"]
        stops = ends and ids[-1] == toy.EOS
        choice: dict[str, Any] = {"token_ids": ids, "finish_reason": "stop" if stops else "length"}
        choice |= {"text": toy.text(ids)} if "prompt" in body else {"message": {"content": ""}}
        chat = {} if "prompt" in body else {"prompt_token_ids": prompt}
        if body.get("prompt_logprobs"):
            return chosen({**body, "prompt_logprobs": 5}, 5, FIELDS)
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}, **chat}

    def tokenize(body: Any) -> Any:
        return {"tokens": split(body["prompt"]) if "prompt" in body else render(body["messages"])}

    def detokenize(body: Any) -> Any:
        return {"prompt": " ".join(f"<{token}>" for token in body["tokens"])}

    models = {"data": [{"id": "base", "max_model_len": length, "owned_by": "vllm"}]}
    return {
        **vllm(),
        "/v1/models": lambda _: models,
        "/v1/completions": generate,
        "/v1/chat/completions": generate,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }


def asked(check: Any, answers: dict[str, Answer], ref: Reference | None = None) -> Check:
    with answering(answers) as requests:
        made: Check = check(Answers(connect(requests.url), ref or reference()), "base", None)
    return made


def codes(check: Check) -> list[str]:
    return [cause.code for cause in check.causes]


def with_system(messages: Sequence[dict[str, str]]) -> list[int]:
    """Render with a default system prompt."""
    default = {"role": "system", "content": "be kind and brief"}
    return toy.rendered([*([] if messages[0]["role"] == "system" else [default]), *messages])


def test_equal_prompts_are_ok() -> None:
    check = asked(template, server())
    assert (check.verdict, check.measured["conversations"]) == ("ok", len(CHATS))
    assert asked(eos, server()).verdict == "ok"
    assert asked(context, server()).verdict == "ok"


@pytest.mark.parametrize(
    ("render", "code", "position"),
    [
        (lambda m: [0, *toy.rendered(m)], "bos-added", 0),
        (lambda m: [toy.rendered(m)[0], *toy.rendered(m)], "bos-twice", 1),
        (lambda m: toy.rendered(m)[1:], "bos-missing", 0),
        (with_system, "system-prompt-added", 0),
        (lambda m: [*toy.rendered(m), 1, 2], "generation-prompt-longer", None),
        (lambda m: [9 if token == 4 else token for token in toy.rendered(m)], "template", 0),
    ],
)
def test_a_template_that_differs_is_named_with_its_first_token(
    render: Callable[[Any], list[int]], code: str, position: int | None
) -> None:
    check = asked(template, server(render))
    assert check.verdict == "fault"
    assert codes(check) == [code]
    assert all(cause.hint for cause in check.causes)
    if position is not None:
        assert check.measured["position"] == position
        assert "<" in check.text  # the server's text of the tokens


def test_a_prompt_without_the_assistants_turn_is_named() -> None:
    check = asked(template, server(lambda m: toy.rendered(m)[:-1]))
    assert check.verdict == "fault"
    assert "generation-prompt-missing" in codes(check)


def test_another_tokenizer_is_named_by_both_checks() -> None:
    def split(text: str) -> list[int]:
        return [(token + 1) % 4 for token in toy.tokens(text)]

    def render(messages: Any) -> list[int]:
        return [(t + 1) % 4 if t < 4 else t for t in toy.rendered(messages)]

    for check in (asked(tokens, server(render, split)), asked(template, server(render, split))):
        assert (check.verdict, codes(check)) == ("fault", ["tokenizer"])


def test_a_bos_before_texts_is_named() -> None:
    check = asked(tokens, server(split=lambda text: [7, *toy.tokens(text)]))
    assert (check.verdict, codes(check)) == ("fault", ["bos-added"])


def test_texts_that_come_back_are_counted() -> None:
    check = asked(tokens, server())
    assert (check.verdict, check.measured["unchanged"]) == ("ok", 0)  # <0> <1> ...
    answers = server()
    texts = {tuple(toy.tokens(text)): text for text in TEXTS}
    answers["/detokenize"] = lambda body: {"prompt": texts[tuple(body["tokens"])]}
    assert asked(tokens, answers).measured["unchanged"] == len(TEXTS)


def test_a_server_that_generates_on_after_eos_is_a_fault() -> None:
    check = asked(eos, server(ends=False))
    assert (check.verdict, codes(check)) == ("fault", ["eos-missing"])
    assert check.measured["token"] == toy.EOS


def test_eos_is_unknown_where_nothing_ends_a_turn() -> None:
    assert asked(eos, server(), reference(tokens={})).verdict == "unknown"


def test_every_token_that_ended_a_turn_has_to_end_it() -> None:
    """The trained model ends its turns with token 7 here; the settings name two more."""
    ref = reference(tokens={"generation_config": {"eos_token_id": [2, toy.EOS]}})
    check = asked(eos, server(), ref)
    assert check.verdict == "fault"  # the toy server generates on after token 2
    assert check.measured["token"] == 2


def test_a_context_shorter_than_the_training_is_a_fault() -> None:
    check = asked(context, server(length=100), reference(longest_row=200))
    assert (check.verdict, codes(check)) == ("fault", ["context-short"])


def test_a_prompt_that_is_cut_silently_is_a_fault() -> None:
    check = asked(context, server(cut=128))
    assert (check.verdict, codes(check)) == ("fault", ["context-cut"])
    assert check.measured["used"] == 128


def test_a_text_that_is_split_otherwise_is_not_cut(tmp_path: Path) -> None:
    """Ollama takes texts: nine tokens of ten are the whole text, half of them are not."""
    names = {name: token for token, name in enumerate("abcd")}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": names}}))
    for share, verdict in ((0.9, "ok"), (0.5, "fault")):

        def generate(body: Any, share: float = share) -> Any:
            return {"response": "a", "prompt_eval_count": int(len(body["prompt"]) * share)}

        answers = {
            "/api/version": lambda _: {"version": "0.13.0"},
            "/api/tags": lambda _: {"models": [{"name": "base"}]},
            "/api/generate": generate,
        }
        with answering(answers) as requests:
            asked_ = connect(requests.url, tokenizer=tmp_path)
            assert context(Answers(asked_, reference()), "base", None).verdict == verdict


def test_a_context_that_was_never_trained_on_may_be_short() -> None:
    assert asked(context, server(length=100), reference(longest_row=80)).verdict == "ok"


def test_a_server_that_tells_lengths_only_is_never_ok() -> None:
    answers = server()
    generate = answers["/v1/chat/completions"]

    def told(body: Any) -> Any:
        answer = generate(body)
        answer.pop("prompt_token_ids", None)
        return answer

    answers |= {"/v1/chat/completions": told, "/tokenize": lambda _: refusal(404, "no")}
    assert asked(template, answers).verdict == "unknown"
    longer = server(with_system) | {"/tokenize": lambda _: refusal(404, "no")}
    generate = longer["/v1/chat/completions"]
    longer["/v1/chat/completions"] = told
    assert asked(template, longer).verdict == "fault"


@pytest.mark.parametrize(
    ("trained", "served", "cut", "kind"),
    [
        ((1, 2, 3), (1, 2, 3), False, None),
        ((1, 2, 3), (1, 2, 3, 4), True, None),
        ((1, 2, 3), (1, 2, 3, 4), False, "generation-prompt-longer"),
        ((1, 2, 3), (1, 2), False, "generation-prompt-missing"),
        ((9, 1, 2), (9, 9, 1, 2), False, "bos-twice"),
        ((1, 2, 3), (9, 1, 2, 3), False, "bos-added"),
        ((9, 1, 2), (1, 2), False, "bos-missing"),
        ((1, 5, 6, 7, 8), (1, 2, 3, 5, 6, 7, 8), False, "inserted"),
        ((1, 2, 3, 5, 6, 7, 8), (1, 5, 6, 7, 8), False, "removed"),
        ((1, 2, 3), (4, 5, 6), False, "other"),
        ((1, 2, 3), (), False, "generation-prompt-missing"),
    ],
)
def test_kinds_of_differences(
    trained: tuple[int, ...], served: tuple[int, ...], cut: bool, kind: str | None
) -> None:
    differs = difference(trained, served, cut=cut)
    assert (differs.kind if differs else None) == kind


def test_conversations_whose_text_alone_is_known_are_compared_by_the_servers_tokenizer() -> None:
    """A served folder has a chat template, and no ids of conversations."""
    probes = tuple(Probe(tuple(toy.tokens(t))[:64], "served", n) for n, t in enumerate(TEXTS))
    chats = tuple(
        Probe((), "chat", number, json.dumps([{"role": r, "content": t} for r, t in chat]))
        for number, chat in enumerate(CHATS)
    )
    served = Reference(probes, measured(probes), None, {}, Path(), chats)

    def split(text: str) -> list[int]:
        return toy.rendered(json.loads(text)) if text.startswith("[") else toy.tokens(text)

    check = asked(template, server(split=split), served)
    assert (check.verdict, check.measured["conversations"]) == ("ok", len(CHATS)), check.text
    check = asked(template, server(with_system, split), served)
    assert check.verdict == "fault"
    assert codes(check) == ["system-prompt-added"]
