"""References of a server: witnesses, served folders, and folders that are neither."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin, publish
from tasks.pipeline.locks import staging
from tasks.verify.reference import Probe, Reference, read_reference
from tasks.witness.plumbline_witness.probes import CALLED, choose, text_with_tools
from tasks.witness.plumbline_witness.probes import TOOLS as SCHEMAS
from tests.tiny import make_tokenizer
from tests.verify.synthetic import world, write_witness


def test_a_witness_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = world().reference(step=3)
    folder = write_witness(tmp_path / "checkpoint-3", made)
    for source in (folder, folder / "plumbline.witness"):
        read = read_reference(source)
        assert read.probes == made.probes
        assert read.base is not None
        assert np.array_equal(read.trained.logprobs, made.trained.logprobs)
        assert read.quantization == "none"
    assert Probe((1, 2), "chat", 1, "...").messages == (
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Say hello in one sentence."},
    )


def test_checkpoints_beside_it_come_nearest_first(tmp_path: Path) -> None:
    made = world().reference()
    for step in (10, 20, 30, 100):
        moved = replace(made.trained, logprobs=made.trained.logprobs - np.float32(step / 1e3))
        write_witness(tmp_path / f"checkpoint-{step}", replace(made, trained=moved), step=step)
    write_witness(tmp_path / "checkpoint-40", world(1).reference(), step=40)  # other probes
    partly = world(2, count=6).reference()
    probes = made.sequences[:4] + partly.sequences[4:]
    common = Reference(
        tuple(Probe(ids, "row", number) for number, ids in enumerate(probes)),
        replace(partly.trained, probes=probes),
    )
    write_witness(tmp_path / "another", common)
    (tmp_path / "checkpoint-35").mkdir()
    read = read_reference(tmp_path / "checkpoint-30")
    siblings = dict(read.siblings())
    assert list(siblings) == ["checkpoint-20", "checkpoint-10", "checkpoint-100", "another"]
    numbers, trained = read.shared(siblings["another"])
    assert (numbers, trained.probes) == ([0, 1, 2, 3], made.sequences[:4])
    assert np.array_equal(trained.logprobs, common.trained.logprobs[: 4 * 19])


@pytest.mark.parametrize("fault", ["absent", "neither", "reward", "mixed", "nan", "probes"])
def test_what_cannot_be_compared_says_what_to_type(tmp_path: Path, fault: str) -> None:
    made, folder = world().reference(), tmp_path / "checkpoint-1"
    if fault == "neither":
        folder.mkdir()
    elif fault != "absent":
        record = write_witness(folder, made) / "plumbline.witness"
    if fault == "reward":
        (record / "fingerprint.fp").rename(record / "scores.json")
    elif fault == "mixed":
        world(1).reference().trained.save(record / "fingerprint.fp")
    elif fault == "nan":
        broken = replace(made.trained, logprobs=made.trained.logprobs * np.float32("nan"))
        broken.save(record / "fingerprint.fp")
    elif fault == "probes":
        facts = json.loads((record / "witness.json").read_text())
        (record / "witness.json").write_text(json.dumps({**facts, "probes": [{"ids": "x"}]}))
    with pytest.raises(ArtifactError) as raised:
        read_reference(folder)
    assert str(folder) in raised.value.report()
    if fault == "neither":
        assert "python -m plumbline_witness --" in raised.value.hint


TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("source", ["served", "witness"])
def test_a_conversation_with_tools_is_rendered_as_training_renders_it(
    tmp_path: Path, source: str
) -> None:
    """JSON as transformers writes it: in the schema's order, no letter escaped."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS
    wanted = tokenizer.apply_chat_template(
        [*CALLED], tools=[*SCHEMAS], tokenize=False, add_generation_prompt=True
    )
    assert '{"type": "function", "function": {"name": "get_weather"' in wanted
    assert '{"city": "Zürich"}' in wanted
    final = tmp_path / "folder"
    if source == "witness":
        write_witness(final, world().reference(), text_with_tools=text_with_tools(tokenizer))
    else:
        with staging(final) as work:
            world().reference().trained.save(work / "fingerprint.fp")
            tokenizer.save_pretrained(work)
            publish(work, final, Origin("served", "convert", "key"))
    last = read_reference(final).unscored[-1]
    assert (last.text, last.messages, last.tools) == (wanted, CALLED, SCHEMAS)
    tokenizer.chat_template = CHATML
    assert text_with_tools(tokenizer) is None, "the template drops them"
    kinds = [probe.kind for probe in choose(tokenizer)]
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TOOLS
    assert text_with_tools(tokenizer) is None, "another text tomorrow"
    assert [probe.kind for probe in choose(tokenizer)] == [
        "dated" if kind == "chat" else kind for kind in kinds
    ]


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (CHATML, [0, 1, 2, 3]),
        (WITHOUT_SYSTEM + CHATML, [0, 2, 3]),  # Gemma's
        ("{{ strftime_now('%d %b %Y') }}" + CHATML, []),  # another text every day
        ("{% if", []),
    ],
)
def test_a_served_folder_tells_how_conversations_are_rendered(
    tmp_path: Path, text: str, numbers: list[int]
) -> None:
    final = tmp_path / "served"
    with staging(final) as work:
        world().reference().trained.save(work / "fingerprint.fp")
        (work / "chat_template.jinja").write_text(text)
        publish(work, final, Origin("served", "convert", "key"))
    chats = read_reference(final).unscored
    assert [(probe.kind, probe.number) for probe in chats] == [("chat", n) for n in numbers]
    if numbers:  # the template drops tools: nothing is compared
        assert chats[0].text == "<user>What is the capital of France?<assistant>"
        assert chats[0].messages == ({"role": "user", "content": "What is the capital of France?"},)
