"""Ways to break a folder: change its tensors, its JSON, its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.audit.corpus import Break, Corpus
from tests.audit.corpus.clean import change_json

Tensors = dict[str, torch.Tensor]


def as_it_is(folder: Path, corpus: Corpus) -> None:
    """The clean one, which is what was reported."""


MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def tensors(edit: Callable[[Tensors], object], name: str = MODEL) -> Break:
    """Change the tensors of one file in place."""

    def how(folder: Path, _: Corpus) -> None:
        held = load_file(folder / name)
        edit(held)
        whole = {key: one.contiguous().clone() for key, one in held.items()}
        save_file(whole, folder / name, metadata={"format": "pt"})

    return how


def renamed(change: Callable[[str], str], name: str = MODEL) -> Break:
    """Give tensors other keys."""

    def edit(held: Tensors) -> None:
        new = {change(key): one for key, one in held.items()}
        held.clear()
        held.update(new)

    return tensors(edit, name)


def dropped(*parts: str, name: str = MODEL, only: int | None = None) -> Break:
    """Leave out tensors with one of these texts in their keys; `only`: so many of them."""

    def edit(held: Tensors) -> None:
        for key in [key for key in held if any(part in key for part in parts)][:only]:
            del held[key]

    return tensors(edit, name)


def emptied(*parts: str, name: str = ADAPTER) -> Break:
    """What ZeRO-3 leaves of a tensor that nobody gathered: shape [0]."""

    def edit(held: Tensors) -> None:
        for key in held:
            if any(part in key for part in parts):
                held[key] = torch.empty(0)

    return tensors(edit, name)


def said(name: str = "config.json", **changes: Any) -> Break:
    """Change a JSON object; None removes a key."""
    return lambda folder, _: change_json(folder / name, **changes)


def token_id(name: str, tokens: Any) -> Break:
    """Change an id in one document."""
    return said(name, eos_token_id=tokens)


def written(name: str, text: str) -> Break:
    """Write a file."""
    return lambda folder, _: (folder / name).write_text(text)


def removed(*names: str) -> Break:
    """Remove files."""
    return lambda folder, _: [(folder / name).unlink() for name in names]


def copied(clean: str, *names: str) -> Break:
    """Copy files of another clean checkpoint into it."""

    def how(folder: Path, corpus: Corpus) -> None:
        for name in names:
            shutil.copyfile(corpus.clean(clean) / name, folder / name)

    return how


def cut(name: str = MODEL, keep: float = 0.5) -> Break:
    """Truncate a file."""

    def how(folder: Path, _: Corpus) -> None:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[: int(len(raw) * keep)])

    return how


def both(*hows: Break) -> Break:
    """One after the other."""

    def how(folder: Path, corpus: Corpus) -> None:
        for one in hows:
            one(folder, corpus)

    return how


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Break:
    """Change tokenizer.json."""

    def how(folder: Path, _: Corpus) -> None:
        path = folder / "tokenizer.json"
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))

    return how


def _one_more(document: dict[str, Any]) -> None:
    last = {**document["added_tokens"][-1], "id": 305, "content": "[PAD]"}
    document["added_tokens"].append(last)


padded = both(tokenizer(_one_more), said("tokenizer_config.json", pad_token="[PAD]"))
"""A padding token that was added, and no row for it."""


def put(key: str, make: Callable[[Tensors], torch.Tensor], name: str = MODEL) -> Break:
    """Add a tensor, made from those that there are."""
    return tensors(lambda held: held.update({key: make(held)}), name)


def state(name: str, make: Callable[[], Any]) -> Break:
    """Save something by torch."""
    return lambda folder, _: torch.save(make(), folder / name)


head = partial(
    put,
    "v_head.summary.weight",
    lambda held: torch.randn(1, held["model.norm.weight"].shape[0]),
)
"""TRL's value head, among the tensors of a file."""
