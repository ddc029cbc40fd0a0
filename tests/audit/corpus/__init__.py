"""Checkpoints to examine: clean ones, as libraries save them, and ways to break them.

corpus = Corpus(tmp)
corpus.clean("qwen2")            a folder, made once
corpus.broken(BROKEN["..."])     a copy of a clean one, broken as in a public report
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.audit.making import edit_json

Tensors = dict[str, torch.Tensor]

Make = Callable[["Corpus", Path], object]
Break = Callable[[Path, "Corpus"], object]


@dataclass(frozen=True)
class Clean:
    """A checkpoint without faults.

    Attributes:
        make: fills an empty folder.
        base: name of the clean model to examine it with as `base=`; "" for none.
        adapter: name of the clean adapter that was merged to make it; "" for none.
    """

    make: Make
    base: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class Broken:
    """A way in which checkpoints of users are broken; `issues` of its check lists the reports.

    Attributes:
        code: the expected finding.
        of: name of the clean checkpoint to copy.
        how: breaks the copy; None if the fault lies in the arguments of the audit.
        base: name of the clean model for `base=`; "" for none, "-" for that of the clean one.
        values: True if only data shows the fault.
        adapter: name of the clean adapter for `adapter=`; "" for none.
        severity: that of the finding; "" where it does not matter.
    """

    code: str
    of: str
    how: Break | None
    base: str = "-"
    values: bool = False
    adapter: str = ""
    severity: str = ""


@dataclass
class Corpus:
    """Clean checkpoints, each made once on demand.

    Attributes:
        root: folder to make them in.
        known: clean checkpoints by name.
    """

    root: Path
    known: Mapping[str, Clean]
    _copies: int = field(default=0, repr=False)

    def clean(self, name: str) -> Path:
        """Return the folder of a clean checkpoint. Tests must not change it."""
        folder = self.root / "clean" / name
        if not folder.is_dir():
            making = self.root / "making" / name
            making.mkdir(parents=True, exist_ok=True)
            self.known[name].make(self, making)
            folder.parent.mkdir(exist_ok=True)
            making.rename(folder)
        return folder

    def base_of(self, name: str) -> Path | None:
        """Return the folder of the base of a clean checkpoint, or None."""
        base = self.known[name].base
        return self.clean(base) if base else None

    def adapter(self, name: str) -> Path | None:
        """Return the folder of a clean adapter; None for ""."""
        return self.clean(name) if name else None

    def broken(self, case: Broken) -> Path:
        """Return a broken copy of a clean checkpoint."""
        self._copies += 1
        folder = self.root / "broken" / str(self._copies) / case.of
        shutil.copytree(self.clean(case.of), folder)
        if case.how is not None:
            case.how(folder, self)
        return folder

    def base_for(self, case: Broken) -> Path | None:
        """Return the folder of the base of a broken checkpoint, or None."""
        if case.base == "-":
            return self.base_of(case.of)
        return self.clean(case.base) if case.base else None


MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"


def tensors(edit: Callable[[Tensors], object], name: str = MODEL) -> Break:
    """Change the tensors of one file in place."""

    def how(folder: Path, _: Corpus) -> None:
        weights = load_file(folder / name)
        edit(weights)
        whole = {key: tensor.contiguous().clone() for key, tensor in weights.items()}
        save_file(whole, folder / name, metadata={"format": "pt"})

    return how


def renamed(change: Callable[[str], str], name: str = MODEL) -> Break:
    """Rename tensors."""

    def edit(weights: Tensors) -> None:
        new = {change(key): tensor for key, tensor in weights.items()}
        weights.clear()
        weights.update(new)

    return tensors(edit, name)


def dropped(*parts: str, name: str = MODEL) -> Break:
    """Remove tensors with one of these texts in their keys."""

    def edit(weights: Tensors) -> None:
        for key in [key for key in weights if any(part in key for part in parts)]:
            del weights[key]

    return tensors(edit, name)


def emptied(*parts: str, name: str = ADAPTER) -> Break:
    """Give tensors the shape [0], as ZeRO-3 saves them if nobody gathers them."""

    def edit(weights: Tensors) -> None:
        for key in weights:
            if any(part in key for part in parts):
                weights[key] = torch.empty(0)

    return tensors(edit, name)


def edited(name: str = "config.json", **changes: Any) -> Break:
    """Change a JSON object; None removes a key."""
    return lambda folder, _: edit_json(folder / name, **changes)


def token_id(name: str, tokens: Any) -> Break:
    """Change `eos_token_id` in one JSON file."""
    return edited(name, eos_token_id=tokens)


def written(name: str, text: str) -> Break:
    """Write a file."""
    return lambda folder, _: (folder / name).write_text(text)


def removed(*names: str) -> Break:
    """Remove files."""
    return lambda folder, _: [(folder / name).unlink() for name in names]


def copied(clean: str, *names: str) -> Break:
    """Copy files of another clean checkpoint."""

    def how(folder: Path, corpus: Corpus) -> None:
        for name in names:
            shutil.copyfile(corpus.clean(clean) / name, folder / name)

    return how


def cut(name: str = MODEL) -> Break:
    """Leave half of a file."""

    def how(folder: Path, _: Corpus) -> None:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[: len(raw) // 2])

    return how


def both(*ways: Break) -> Break:
    """Apply several ways, one after the other."""

    def how(folder: Path, corpus: Corpus) -> None:
        for way in ways:
            way(folder, corpus)

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


padded = both(tokenizer(_one_more), edited("tokenizer_config.json", pad_token="[PAD]"))
"""A padding token without a row in the embedding."""


def put(key: str, make: Callable[[Tensors], torch.Tensor], name: str = MODEL) -> Break:
    """Add a tensor that is made from the others."""
    return tensors(lambda weights: weights.update({key: make(weights)}), name)


def save_head(folder: Path, name: str = "value_head.safetensors") -> None:
    """Save a value head in a file of its own."""
    save_file({"v_head.summary.weight": torch.randn(1, 32)}, folder / name)


def state(name: str, make: Callable[[], Any]) -> Break:
    """Save an object with torch."""
    return lambda folder, _: torch.save(make(), folder / name)


head = partial(
    put,
    "v_head.summary.weight",
    lambda weights: torch.randn(1, weights["model.norm.weight"].shape[0]),
)
"""TRL's value head, among the tensors of a file."""
