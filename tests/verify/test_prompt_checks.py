"""Prompts, EOS and context: each planted difference is a fault and is named; equal ones are ok."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.core.report import Row
from tasks.verify.compare import Asked
from tasks.verify.dialects import connect
from tasks.verify.prompt import context, eos, template, tokens
from tasks.verify.reference import Probe, Reference
from tasks.verify.server import Server
from tasks.witness.plumbline_witness.probes import CALLED, CHATS, TEXTS, TOOLS
from tests.answering import answering
from tests.verify import toy
from tests.verify.toy import ToyServer, causes, reference


def asked(check: Any, server: Server | None = None, ref: Reference | None = None) -> Row:
    made: Row = check(Asked(server or ToyServer(), "base", None, ref or reference()))
    return made


def with_system(messages: Sequence[dict[str, str]]) -> list[int]:
    """Render with a default system prompt."""
    default = {"role": "system", "content": "be kind and brief"}
    return toy.rendered([*([] if messages[0]["role"] == "system" else [default]), *messages])


def other_split(text: str) -> list[int]:
    return [(token + 1) % 4 for token in toy.tokens(text)]


def other_tokens(messages: Any) -> list[int]:
    return [(token + 1) % 4 if token < 4 else token for token in toy.rendered(messages)]


def test_equal_prompts_are_ok() -> None:
    for check, measured in ((template, {"conversations": len(CHATS)}), (tokens, {"texts": 6})):
        row = asked(check)
        assert row.verdict == "ok"
        assert measured.items() <= row.measured.items()
    assert [asked(check).verdict for check in (eos, context)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("render", "code", "position"),
    [
        (lambda m: [0, *toy.rendered(m)], "bos", 0),
        (lambda m: [toy.rendered(m)[0], *toy.rendered(m)], "bos", 1),
        (lambda m: toy.rendered(m)[1:], "bos", 0),
        (with_system, "system-prompt", 0),
        (lambda m: [*toy.rendered(m), 1, 2], "generation-prompt", None),
        (lambda m: [9 if token == 4 else token for token in toy.rendered(m)], "template", 0),
        (lambda m: toy.rendered(m)[:-1], "generation-prompt", None),
    ],
)
def test_a_template_that_differs_is_named_with_its_first_token(
    render: Callable[[Any], list[int]], code: str, position: int | None
) -> None:
    check = asked(template, ToyServer(render_chat=render))
    assert check.verdict == "fault"
    assert causes(check) == [code]
    if position is not None:
        assert check.measured["position"] == position
        assert str(check.measured["served"]).startswith("(")  # the server's tokens


@pytest.mark.parametrize(
    ("check", "fault", "cause"),
    [
        (tokens, {"render_chat": other_tokens, "split": other_split}, "tokenizer"),
        (template, {"render_chat": other_tokens, "split": other_split}, "tokenizer"),
        (tokens, {"split": lambda text: [7, *toy.tokens(text)]}, "bos"),
        (eos, {"ends": False}, "eos-missing"),
        (context, {"cut": 128}, "context-cut"),
    ],
)
def test_a_fault_is_named(check: Any, fault: dict[str, Any], cause: str) -> None:
    row = asked(check, ToyServer(**fault))
    assert (row.verdict, causes(row)) == ("fault", [cause])


def test_every_token_that_ended_a_turn_has_to_end_it() -> None:
    """The trained model ends its turns with token 7 here; the settings name two more."""
    assert asked(eos, None, reference(tokens={})).verdict == "unknown"
    ref = reference(tokens={"generation_config": {"eos_token_id": [2, toy.EOS]}})
    check = asked(eos, None, ref)
    assert (check.verdict, check.measured["token"]) == ("fault", 2)


def test_a_context_shorter_than_the_training_is_a_fault() -> None:
    check = asked(context, ToyServer(length=100), reference(longest_row=200))
    assert (check.verdict, causes(check)) == ("fault", ["context-short"])
    assert asked(context, ToyServer(length=100), reference(longest_row=80)).verdict == "ok"


@pytest.mark.parametrize(("render", "verdict"), [(toy.rendered, "unknown"), (with_system, "fault")])
def test_a_server_that_tells_lengths_only_is_never_ok(render: Any, verdict: str) -> None:
    server = ToyServer(render_chat=render, tells_ids=False)
    assert asked(template, server).verdict == verdict


def test_conversations_whose_text_alone_is_known_are_compared_by_the_servers_tokenizer() -> None:
    """A served folder has a chat template, and no ids of conversations."""
    probes = tuple(Probe(tuple(toy.tokens(t))[:64], "served", n) for n, t in enumerate(TEXTS))
    chats = tuple(
        Probe((), "chat", number, json.dumps([{"role": r, "content": t} for r, t in chat]))
        for number, chat in enumerate(CHATS)
    )
    served = Reference(probes, toy.fingerprint(probes), None, {}, Path(), chats)

    def split(text: str) -> list[int]:
        return toy.rendered(json.loads(text)) if text.startswith("[") else toy.tokens(text)

    assert asked(template, ToyServer(split=split), served).verdict == "ok"
    check = asked(template, ToyServer(render_chat=with_system, split=split), served)
    assert (check.verdict, causes(check)) == ("fault", ["system-prompt"])


@pytest.mark.parametrize("leaves_out", ["", "tools", "tool_calls"])
def test_a_conversation_with_tools_is_compared_as_the_server_renders_it(leaves_out: str) -> None:
    """A server's template that drops schemas or calls is no other system prompt."""
    ids = tuple(toy.rendered(CALLED, TOOLS))
    made = reference()
    probe = Probe(ids, "chat", 9, turns=CALLED, tools=TOOLS)
    ref = Reference(made.probes, made.trained, None, made.facts, Path(), (probe,))
    answers = toy.openai(length=600)
    chat = answers["/v1/chat/completions"]

    def forgetful(body: Any) -> Any:
        body = json.loads(json.dumps(body))
        for part in (body, *body["messages"]):
            part.pop(leaves_out, None)
        return chat(body)

    with answering({**answers, "/v1/chat/completions": forgetful}) as requests:
        row = asked(template, connect(requests.url), ref)
    assert row.verdict == ("fault" if leaves_out else "ok")
    assert causes(row) == (["template"] if leaves_out else [])
    assert row.measured["differing"] == bool(leaves_out)
    assert asked(template, ToyServer(tells_ids=False), ref).verdict == "unknown"
