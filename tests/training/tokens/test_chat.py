"""Loss marks: exact values for known templates, and for any conversation."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl.responses import load_prompts
from tasks.serving.prompts import render
from tasks.training.engine.deepspeed_engine import SingleRank
from tasks.training.tokens.chat import Turns, Unfit, encode_conversations
from tasks.training.tokens.examples import Tokens

Turn = tuple[str, str]


def turns(*dialogue: Turn, first: int | None = None, everything: bool = False) -> Turns:
    messages = [{"role": role, "content": content} for role, content in dialogue]
    return Turns(messages, len(dialogue) - 1 if first is None else first, everything)


def encode(tokenizer, conversation: Turns, template: str | None = None) -> Tokens | Unfit:
    """Encode with the tokenizer's chat template, or another, as `data.chat_template` gives one."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    (encoded,) = encode_conversations(tokenizer, {tokenizer.eos_token_id}, [conversation])
    return encoded


def marked(tokenizer, encoded: Tokens | Unfit) -> list[str]:
    """Return the parts of the text that bear loss."""
    assert isinstance(encoded, Tokens), encoded
    ids, bears = np.asarray(encoded.ids), np.asarray(encoded.bears)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bears, [0]]).astype(int)))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


CHAT = (("user", "hi"), ("assistant", "yo"), ("user", "c"), ("assistant", "d"))


def test_loss_on_the_last_answer_every_answer_or_every_token(tokenizer) -> None:
    assert marked(tokenizer, encode(tokenizer, turns(*CHAT))) == ["d<|im_end|>"]
    every = encode(tokenizer, turns(*CHAT, first=0))
    assert marked(tokenizer, every) == ["yo<|im_end|>", "d<|im_end|>"]
    whole = encode(tokenizer, turns(*CHAT, everything=True))
    assert isinstance(whole, Tokens)
    assert isinstance(every, Tokens)
    assert np.array_equal(whole.ids, every.ids)
    # The first token has none before it to predict it from.
    assert list(whole.bears) == [0] + [1] * (len(whole.ids) - 1)
    later = encode(tokenizer, turns(*CHAT, ("user", "e"), ("assistant", "f"), first=2))
    assert marked(tokenizer, later) == ["d<|im_end|>", "f<|im_end|>"]


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of Qwen3: reasoning stays in the last turn only."""


def test_a_template_that_drops_earlier_reasoning(tokenizer) -> None:
    dialogue = (("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"),
            ("assistant", "<think>y</think>d"))  # fmt: skip
    last = encode(tokenizer, turns(*dialogue), THINKS)
    assert marked(tokenizer, last) == ["<think>y</think>d<|im_end|>"]
    assert isinstance(last, Tokens)
    assert "x</think>" not in tokenizer.decode(last.ids)
    every = encode(tokenizer, turns(*dialogue, first=0), THINKS)
    assert isinstance(every, Unfit)
    assert "message 2" in str(every)
    assert "train.mask=last_answer" in str(every)


USER = "{% if m.role == 'user' %}{{ m.content }}{% endif %}"
EACH = "{% for m in messages %}"
HIDING = (
    # The generation prompt stands before the conversation.
    "{% if add_generation_prompt %}A:{% endif %}"
    f"{EACH}{{{{ m.content }}}}{{% endfor %}}<|im_end|>",
    # Turns do not end.
    f"{EACH}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endfor %}}",
    # The assistant's words are left out.
    f"{EACH}{{{{ m.role }}}}{USER}<|im_end|>{{% endfor %}}"
    "{% if add_generation_prompt %}assistant{% endif %}",
    "{{ raise_exception('no assistants here') }}",
)


def test_answers_that_cannot_be_marked_are_refused(tokenizer) -> None:
    """The first token cannot be predicted: counting it would make the mean loss wrong."""
    for template in HIDING:
        assert isinstance(encode(tokenizer, turns(*CHAT[:2]), template), Unfit), template
    bare = f"{EACH}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    assert marked(tokenizer, encode(tokenizer, turns(*CHAT[:2]), bare)) == ["yo<|im_end|>"]
    assert isinstance(encode(tokenizer, turns(("assistant", "yo")), bare), Unfit)
    assert isinstance(encode(tokenizer, turns(*CHAT[:3])), Unfit), "it ends with a question"


def merging_tokenizer():
    """Return a byte tokenizer with one merge across the boundary: " y" is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "Ġy"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "y")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:GAP{% endif %}"
)


def test_the_first_token_of_an_answer_bears_loss_or_the_sample_is_refused() -> None:
    """Known failure elsewhere: the prompt, tokenised alone, contains the answer's first token.

    If the prompt ends in a space, the space and the answer's first letter are one token in the
    conversation and two in a server's request: the answer begins at no token.
    """
    tokenizer = merging_tokenizer()
    apart = encode(tokenizer, turns(*CHAT[:2]), SPACED.replace("GAP", " "))
    assert isinstance(apart, Unfit)
    encoded = encode(tokenizer, turns(*CHAT[:2]), SPACED.replace("GAP", ""))
    assert marked(tokenizer, encoded) == [" yo<|im_end|>"]
    assert isinstance(encoded, Tokens)
    first = int(np.argmax(np.asarray(encoded.bears)))
    assert tokenizer.convert_ids_to_tokens(int(np.asarray(encoded.ids)[first])) == "Ġy"


PIECES = [*"ab <|>é\n\u2028:", "<|im_end|>"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
ANSWER = TEXT.filter(lambda text: text != "")
CONVERSATION = st.tuples(
    st.none() | TEXT, st.lists(st.tuples(TEXT, ANSWER), min_size=1, max_size=4)
)


@settings(max_examples=60)
@given(conversation=CONVERSATION, first=st.integers(0, 9))
def test_marks_are_the_answers_and_nothing_else(tokenizer, conversation, first) -> None:
    """Compare with spans joined piece by piece; every byte and every special token is one token."""
    system, exchanges = conversation
    dialogue = [] if system is None else [("system", system)]
    dialogue += [turn for q, a in exchanges for turn in (("user", q), ("assistant", a))]
    first = min(first, len(dialogue) - 1)
    pieces: list[tuple[str, int]] = []
    for number, (role, content) in enumerate(dialogue):
        bears = int(role == "assistant" and number >= first)
        pieces += [(f"<|im_start|>{role}\n", 0), (f"{content}<|im_end|>", bears), ("\n", 0)]
    ids, marks = [], []
    for text, bears in pieces[:-1]:  # nothing comes after the last answer's end
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        marks += [bears] * (len(ids) - len(marks))
    encoded = encode(tokenizer, turns(*dialogue, first=first))
    assert isinstance(encoded, Tokens)
    assert (list(encoded.ids), list(encoded.bears)) == (ids, marks)


PARTS = {
    "tools": "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}",
    "calls": "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}",
    "reasoning": "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
    "results": "{{ m.content }}",
}
SCHEMAS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"at": 1}}}
MESSAGES = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "no"},
    {"role": "assistant", "content": "No.", "reasoning_content": "dry"},
]


def calling(without: str = "") -> str:
    """Return a ChatML template that may lack a part."""
    parts = {**PARTS, without: ""}
    return (
        f"{parts['tools']}{EACH}<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'tool' %}}"
        f"{parts['results']}{{% else %}}{parts['reasoning']}{{{{ m.content }}}}{parts['calls']}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def encode_call(tokenizer, without: str = "") -> Tokens | Unfit:
    """Encode `MESSAGES`."""
    return encode(tokenizer, Turns(MESSAGES, 0, tools=SCHEMAS), calling(without))


def test_calls_reasoning_and_answers_bear_loss_and_results_do_not(tokenizer) -> None:
    tokens = encode_call(tokenizer)
    assert marked(tokenizer, tokens) == [
        '<tool_call>weather {"at": 1}</tool_call><|im_end|>',
        "<think>dry</think>No.<|im_end|>",
    ]
    assert isinstance(tokens, Tokens)
    prompt = np.asarray(tokens.ids)[: int(np.argmax(np.asarray(tokens.bears)))]
    assert '"name": "weather"' in tokenizer.decode(prompt)


@pytest.mark.parametrize("count", [2, 4], ids=["a call", "an answer to a result"])
def test_prompts_with_tools_have_the_tokens_that_training_saw(
    tokenizer, count: int, tmp_path: Path
) -> None:
    """An evaluation or a rollout of other prompts would show another model than was trained."""
    row = {"id": "a", "messages": MESSAGES[:count], "tools": SCHEMAS}
    trained = encode(tokenizer, Turns(row["messages"], count - 1, tools=SCHEMAS), calling())
    assert isinstance(trained, Tokens)
    prompt = np.asarray(trained.ids)[: int(np.argmax(trained.bears))].tolist()
    served = copy.copy(tokenizer)
    served.chat_template = calling()
    served.save_pretrained(tmp_path)
    (path := tmp_path / "train.jsonl").write_text(json.dumps(row))
    (sampled,) = load_prompts(path, tokenizer=served, limit=512, ranks=SingleRank())
    assert render(tmp_path, [row]).tokens == [prompt]
    assert sampled.ids.tolist() == prompt


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("tools", "tools"),
        ("calls", "'tool_calls' of message 2"),
        ("results", "message 3"),
        ("reasoning", "'reasoning_content' of message 4"),
    ],
)
def test_a_template_that_leaves_something_out_is_refused(tokenizer, part: str, named: str) -> None:
    result = encode_call(tokenizer, part)
    assert isinstance(result, Unfit)
    assert named in str(result)
