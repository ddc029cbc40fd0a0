"""Kinds of rows in a dataset artifact: how a row of the user becomes one, and who trains on it.

    conversations   {"id", "messages", "tools"?}
    texts           {"id", "text"}
    pairs           {"id", "prompt", "chosen", "rejected", "margin"?, "tools"?}
    labelled        {"id", "messages", "desirable", "tools"?}
    prompts         {"id", "messages", "answer"?, "columns", "tools"?}

Held-out pairs also have `messages`, the prompt with the chosen answer, to evaluate the served
model. The answers of a pair are texts beside a prompt, messages beside a prompt, or whole
conversations that begin with the prompt (UltraFeedback, HH); the prompt then ends before the first
message that differs. The answer of a prompt for online training is for rewards and evaluation; the
model does not see it. Null and blank text count as no answer, because a CSV file cannot leave a
cell out. All other columns of prompts are passed on to rewards.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config.defaults import ONLINE
from tasks.data.messages import (
    REASONING,
    SYSTEM,
    TOOLS,
    Columns,
    Message,
    Unusable,
    conversation,
    filled,
    has_text,
    kind_of,
    messages_of,
    require_turns,
    sound,
    system_message,
    tools_of,
    transcript,
    turns_of,
)

Payload = dict[str, Any]
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
"""Labels, in lower case."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of media, for which the texts have a placeholder that no text model knows."""

_THOUGHTS = ("reasoning", *REASONING)
"""Columns with the reasoning before an answer."""


@dataclass(frozen=True)
class Kind:
    """One kind of rows."""

    name: str  # name in `dataset.json`
    # turns a row of the user into a row of the artifact, without its id
    convert: Callable[[Mapping[str, Any], Columns], Payload]
    # sets of columns by role; a row needs all columns of one set
    either: tuple[tuple[str, ...], ...]
    objectives: tuple[str, ...]  # objectives that train on such rows

    def read(
        self, values: Mapping[str, Any], columns: Columns, ignored: Collection[str] = ()
    ) -> Payload:
        """Return a row of the artifact. Raises Unusable for one that training cannot use whole."""
        for key in {*MEDIA} - {*ignored, *vars(columns).values()}:
            if values.get(key):
                way = f"data.ignored_columns=[{key}] leaves it out"
                raise Unusable(f"{key!r} is not empty, and only text is trained; {way}")
        return self.convert(values, columns)

    def fit(self, names: Collection[str], columns: Columns) -> bool:
        """Return True if a row with columns `names` has all columns of one set."""
        return any(all(getattr(columns, r) in names for r in roles) for roles in self.either)

    def wanted(self, columns: Columns) -> dict[str, str]:
        """Return the names of the required columns, by role; a row needs one set of them."""
        roles = dict.fromkeys(role for roles in self.either for role in roles)
        return {role: name for role in roles if (name := getattr(columns, role)) is not None}


def _messages(values: Mapping[str, Any], columns: Columns) -> Payload:
    return {"messages": conversation(values, columns), **tools_of(values)}


def document(values: Mapping[str, Any], columns: Columns) -> Payload:
    """Return `{"text"}`: a raw text, unchanged, as in pre-training. Training adds EOS."""
    if columns.text is None or columns.text not in values:
        raise Unusable(f"no {columns.text!r}, the column of the text")
    return {"text": filled(values[columns.text], columns.text)}


def asked(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return `{"messages", "answer"?, "columns", "tools"?}`; an answer is the last message, too."""
    messages, used = turns_of(values, columns, answered=False)
    answer = None
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        answer = None if last.get("tool_calls") else last["content"]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise Unusable("there is no user's message to answer")
    if columns.answer is not None and columns.answer in values:
        used.add(columns.answer)
        if has_text(values[columns.answer]):
            answer = _as_text(values[columns.answer], columns.answer)
    row: dict[str, Any] = {"messages": messages}
    if answer is not None:
        row["messages"] = [*messages, {"role": "assistant", "content": answer}]
        row["answer"] = answer
    row |= tools_of(values)
    used.update(TOOLS)
    row["columns"] = {key: _plain(key, value) for key, value in values.items() if key not in used}
    return row


def _as_text(value: object, key: str) -> str:
    """Return an answer as text; a number is a usual answer."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Unusable(f"{key!r} must be text or a number, found {kind_of(value)}")
    return sound(value, repr(key)) if isinstance(value, str) else str(value)


def _plain(key: str, value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Unusable(f"{key!r} cannot be passed on to a reward: {error}") from error
    return value


def preference(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return `{"prompt", "chosen", "rejected", "margin"?}`: lists of messages, and a number."""
    missing = [name for name in (columns.chosen, columns.rejected) if name not in values]
    if missing:
        raise Unusable("no " + ", no ".join(repr(name) for name in missing))
    prompt = _prompt_of(values, columns)
    chosen = _answer(values, columns.chosen, prompt)
    rejected = _answer(values, columns.rejected, prompt)
    if chosen == rejected:
        raise Unusable(f"{columns.chosen!r} and {columns.rejected!r} are equal: nothing to prefer")
    if prompt is None:
        cut = _parting(chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    if prompt and prompt[0]["role"] != "system":
        prompt = [*system_message(values, columns), *prompt]
    for name, turns in ((columns.chosen, chosen), (columns.rejected, rejected)):
        require_turns([*prompt, *turns])
        if not turns or {turns[0]["role"], turns[-1]["role"]} != {"assistant"}:
            raise Unusable(f"{name!r} must begin and end with an answer after the prompt")
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        if not all(turn.get("tool_calls") or turn["content"].strip() for turn in answers):
            raise Unusable(f"{name!r} is empty: there is nothing to learn")
    row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    row |= tools_of(values)
    if columns.margin is not None:
        row["margin"] = _number(values, columns.margin)
    return row


def labelled(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return `{"messages", "desirable"}`: a conversation, and the label of its last answer."""
    if columns.label not in values:
        raise Unusable(f"no {columns.label!r}, the column of the label")
    raw = values[columns.label]
    flag = _FLAGS.get(str(raw).lower()) if isinstance(raw, bool | int | str) else None
    if flag is None:
        raise Unusable(f"{columns.label!r} must be true or false, found {repr(raw)[:40]}")
    return {"messages": conversation(values, columns), "desirable": flag, **tools_of(values)}


def _prompt_of(values: Mapping[str, Any], columns: Columns) -> list[Message] | None:
    """Return the messages before the answers; None if the answers contain the prompt."""
    if columns.prompt not in values:
        key = columns.messages or ""
        if isinstance(values[columns.chosen], Mapping) and key in values:
            return messages_of(values[key], key)  # ShareGPT's pairs
        return None
    raw = values[columns.prompt]
    if isinstance(raw, str):
        text = sound(raw, repr(columns.prompt))
        return transcript(text) or [{"role": "user", "content": text}]
    return messages_of(raw, columns.prompt)


def _answer(values: Mapping[str, Any], key: str, prompt: list[Message] | None) -> list[Message]:
    """Return the messages after `prompt`; the whole conversation if the prompt is not known."""
    raw = values[key]
    if isinstance(raw, str):
        text = filled(raw, key)
        turns = transcript(text)
        if turns is None and prompt is None:
            raise Unusable(f"{key!r} is a text, and there is no prompt to go with it")
        messages = turns or [{"role": "assistant", "content": text}]
    else:
        messages = messages_of([raw] if isinstance(raw, Mapping) else raw, key)
    if prompt is None or messages[0]["role"] == "assistant":
        return messages
    # A conversation beside its prompt. A system message may stand in only one of the two.
    for start in (prompt, prompt[1:] if prompt[0]["role"] == "system" else prompt):
        if start and messages[: len(start)] == start:
            return messages[len(start) :]
    raise Unusable(f"{key!r} is a conversation that does not begin with the row's prompt")


def _parting(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of common messages, after which both conversations have an answer."""
    same, shorter = 0, min(len(chosen), len(rejected))
    while same < shorter and chosen[same] == rejected[same]:
        same += 1
    if same == shorter:  # the shorter one ends here: split before its last answer
        same = shorter - 1
    if same < 1 or chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
        at = f"message {same + 1}"
        raise Unusable(f"the two conversations differ first at {at}, which is not an answer")
    return same


def _number(values: Mapping[str, Any], key: str) -> float:
    """Return the margin as a number; a CSV file has it as text."""
    if key not in values:
        raise Unusable(f"no {key!r}, the column of the margin")
    raw = values[key]
    try:
        number = math.nan if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise Unusable(f"{key!r} must be a finite number, found {repr(raw)[:40]}")
    return number


CONVERSATIONS = Kind("conversations", _messages, (("messages",), ("prompt", "response")), ("sft",))
TEXTS = Kind("texts", document, (("text",),), ("sft",))
PAIRS = Kind("pairs", preference, (("chosen", "rejected"),), ("reward", "dpo", "orpo", "simpo"))
LABELLED = Kind(
    "labelled", labelled, (("messages", "label"), ("prompt", "response", "label")), ("kto",)
)
PROMPTS = Kind("prompts", asked, (("messages",), ("prompt",)), ONLINE)
KINDS = {kind.name: kind for kind in (CONVERSATIONS, PAIRS, LABELLED, TEXTS, PROMPTS)}


def kind_for(objective: str, *, texts: bool = False) -> Kind:
    """Return the kind of rows that an objective trains on.

    `texts`: True if the data are raw texts (`names_texts`); ignored for an objective that cannot
    train on them.
    """
    if texts and objective in TEXTS.objectives:
        return TEXTS
    return {o: k for k in KINDS.values() if k is not TEXTS for o in k.objectives}[objective]


def names_texts(section: Mapping[str, Any]) -> bool:
    """Return True if section `data`, or one of its sources, names a column of raw texts."""
    sections = [section, *section.get("sources", ())]
    return any(source.get("text_key") is not None for source in sections)


def unread(values: Mapping[str, Any], columns: Columns, payload: Payload) -> set[str]:
    """Return the columns with a system message, reasoning or an input that no setting names.

    A row that has such in its messages needs no column, and rewards get the columns of prompts.
    """
    turns = payload.get("messages") or [*payload.get("prompt", ()), *payload.get("chosen", ())]
    names: tuple[str, ...] = () if not turns or turns[0]["role"] == "system" else SYSTEM
    if turns and "columns" not in payload:
        names += () if any(key in turn for turn in turns for key in REASONING) else _THOUGHTS
        alpaca = columns.messages not in values and isinstance(values.get(columns.prompt), str)
        names += ("input",) if alpaca else ()
    texts = {name: values.get(name) for name in {*names} - {*vars(columns).values()}}
    # One word of reasoning is a switch: "on".
    return {
        name
        for name, text in texts.items()
        if isinstance(text, str) and len(text.split()) > (name in _THOUGHTS)
    }


def content_id(payload: Payload) -> str:
    """Return the id of a row: 16 hexadecimal digits, a hash of its contents."""
    parts = list(payload.values())
    if set(payload) == {"messages"}:
        return _digest(_texts(parts[0]))
    return _digest([_texts(part) if isinstance(part, list) else part for part in parts])


def side_id(payload: Payload) -> str:
    """Return the hash that decides whether a row is held out.

    All pairs, prompts and labelled answers with the same prompt have the same hash, so a model is
    never evaluated on a prompt that it was trained on. For conversations it is a hash of the whole
    text.
    """
    if "prompt" in payload:
        return _digest(_texts(payload["prompt"]))
    if "columns" in payload:
        return _digest(_texts([m for m in payload["messages"] if m["role"] != "assistant"]))
    if "desirable" in payload:
        return _digest(_texts(payload["messages"][:-1]))
    return content_id(payload)


def _texts(messages: list[Message]) -> list[Any]:
    """Return role and text of plain messages, and anything else as it is."""
    return [[m["role"], m["content"]] if set(m) == {"role", "content"} else m for m in messages]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()[:16]
