"""Read what a running server is compared with: a witness, or a folder that Plumbline served.

A witness (`plumbline.witness`) is what the trained model computed in the trainer's own process,
and, for an adapter, what its base computed. A served folder has the fingerprint of itself, and that
of the base if the model was merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.errors import ArtifactError, PlumblineError
from tasks.core.terminal import typed
from tasks.drift.fingerprint import Fingerprint, drift, require_informative
from tasks.drift.witness import find_witness
from tasks.weights.files.documents import read_json, read_manifest
from tasks.weights.tokens.render_template import TemplateError
from tasks.weights.tokens.tokenizer import prompts_of, template_of
from tasks.witness.plumbline_witness.prints import BASE, FINGERPRINT, NOISE
from tasks.witness.plumbline_witness.probes import CHATS

SIBLINGS = 8
"""Most other models that are read."""
COMMON = 4
"""Fewest probes on which two models are compared."""
_NO_REFERENCE = (
    "train with `python -m plumbline_witness -- <your training command>`, which records what a "
    "server is compared with; or make a served folder: `python flows/deliver.py {source} "
    "base=<the base> out=<a new folder>`, and give that as source"
)
_DATE = re.compile(r"strftime|datetime|\bnow\b|today")
"""Words of chat templates that write the date of the request."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Probe:
    """One token sequence of the reference.

    Attributes:
        ids: token ids, at least two; none of a conversation whose text alone is known.
        kind: "text", "chat", "prompt" (of the user), "row" (of the training data), or "served" (of
            a served folder).
        number: position in its set.
        text: what was tokenised, for conversations as rendered; None if it was not recorded.
        turns: the conversation of kind "chat"; None for the public one of this number.
    """

    ids: tuple[int, ...]
    kind: str
    number: int
    text: str | None = None
    turns: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...] | None:
        """The conversation, which ends in the user's turn; None unless it is of kind "chat"."""
        if self.turns is not None:
            return self.turns
        if self.kind != "chat" or not 0 <= self.number < len(CHATS):
            return None
        return tuple({"role": role, "content": text} for role, text in CHATS[self.number])


@dataclass(frozen=True)
class Reference:
    """The trained model, as it was measured.

    Attributes:
        probes: what was measured, in the order of the fingerprints.
        trained: fingerprint of the trained model.
        base: log-probabilities without the adapter, at the same ids; None without adapter.
        facts: `witness.json`; of a served folder, what its files tell under the same keys.
        folder: the folder that the user named.
        unscored: conversations and texts whose tokens alone are known.
    """

    probes: tuple[Probe, ...]
    trained: Fingerprint
    base: Fingerprint | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    unscored: tuple[Probe, ...] = ()

    @property
    def tokenised(self) -> tuple[Probe, ...]:
        """Everything whose tokens a server can be compared with."""
        return (*self.probes, *self.unscored)

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of all probes."""
        return tuple(probe.ids for probe in self.probes)

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Token ids before each position of the fingerprints."""
        return [ids[:end] for ids in self.sequences for end in range(1, len(ids))]

    @property
    def quantization(self) -> str:
        """Storage of the base's layers in training: "none", "nf4", ...; "" if unknown."""
        stored = self.facts.get("quantization")
        return str(stored.get("method", "")) if isinstance(stored, Mapping) else ""

    @property
    def adapter(self) -> Mapping[str, Any]:
        """PEFT configuration of the active adapter; empty without one."""
        peft = self.facts.get("peft")
        if not isinstance(peft, Mapping) or not isinstance(peft.get("adapters"), Mapping):
            return {}
        adapters = peft["adapters"]
        active = next((name for name in peft.get("active") or () if name in adapters), None)
        chosen = adapters.get(active or next(iter(adapters), ""))
        return chosen if isinstance(chosen, Mapping) else {}

    @property
    def every_end(self) -> list[int]:
        """Tokens that end a turn: the tokenizer's EOS first, then those of the settings."""
        tokens, ends = self.facts.get("tokens") or {}, list[Any]()
        for part in ("tokenizer", "generation_config", "config"):
            value = (tokens.get(part) or {}).get("eos_token_id")
            ends += value if isinstance(value, list) else [value]
        return list(dict.fromkeys(end for end in ends if isinstance(end, int)))

    def siblings(self) -> tuple[tuple[str, Reference], ...]:
        """Return other models by name: checkpoints of the same training, then other trainings.

        Folders `checkpoint-N` beside this one or inside of it, the nearest step first, and other
        folders beside it. Those without a readable record of `COMMON` of the same probes are left
        out.
        """
        step = self.facts.get("step")
        siblings: list[tuple[str, Reference]] = []
        for folder in self._folders(step if isinstance(step, int) else 0):
            if len(siblings) == SIBLINGS:
                break
            try:
                sibling = read_reference(folder)
            except (PlumblineError, OSError):
                continue
            again = np.array_equal(sibling.trained.logprobs, self.trained.logprobs)
            common = set(sibling.sequences) & set(self.sequences)
            if not again and len(common) >= COMMON:
                siblings.append((folder.name, sibling))
        return tuple(siblings)

    def _folders(self, step: int) -> list[Path]:
        """Return folders with a record beside and inside of this one, the nearest step first."""
        here = self.folder.resolve()
        near: dict[Path, float] = {}
        for parent in (here.parent, here):
            for path in parent.glob("*/plumbline.witness"):
                match = _CHECKPOINT.fullmatch(path.parent.name)
                near[path.parent] = abs(int(match[1]) - step) if match else math.inf
        near.pop(here, None)
        return sorted(near, key=lambda path: (near[path], path))

    def shared(self, other: Reference) -> tuple[list[int], Fingerprint]:
        """Return the numbers of the probes that another reference has too, and its print of them.

        The print has these probes alone, in the order of the numbers.
        """
        theirs = {ids: number for number, ids in enumerate(other.sequences)}
        common = [number for number, ids in enumerate(self.sequences) if ids in theirs]
        picked = [theirs[self.sequences[number]] for number in common]
        return common, _part(other.trained, picked)


def _part(whole: Fingerprint, numbers: Sequence[int]) -> Fingerprint:
    """Return a fingerprint of some probes alone."""
    ends = np.cumsum([0, *(len(ids) - 1 for ids in whole.probes)])
    rows = np.concatenate([np.arange(ends[number], ends[number + 1]) for number in numbers])
    return replace(
        whole,
        probes=tuple(whole.probes[number] for number in numbers),
        ids=whole.ids[rows],
        logprobs=whole.logprobs[rows],
        top1=whole.top1[rows],
        steps=None if whole.steps is None else whole.steps[rows],
    )


def read_reference(folder: Path) -> Reference:
    """Read the witness of a folder, or the fingerprint of a folder that Plumbline served.

    Raises ArtifactError if there is neither, it is of a reward model, or it cannot be read.
    """
    if not folder.is_dir():
        raise ArtifactError(f"no such folder: {folder}", hint="source=<the folder of a checkpoint>")
    if folder.name == "plumbline.witness" and (folder / "witness.json").is_file():
        folder = folder.resolve().parent
    witness = find_witness(folder)
    if witness is None:
        return _served(folder)
    if witness.measured.name != FINGERPRINT:
        raise ArtifactError(
            f"{witness.folder}: scores of a reward model; verify compares log-probabilities",
            hint="serve it by `python flows/deliver.py`, which compares its scores in the engine",
        )
    trained = _load(witness.measured)
    require_informative(trained, str(witness.folder))
    entries = witness.facts["probes"]
    try:
        probes = tuple(
            Probe(
                tuple(map(int, entry["ids"])),
                str(entry["kind"]),
                int(entry["number"]),
                entry.get("text"),
            )
            for entry in entries
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{witness.folder}/witness.json: unreadable probes: {error!r}"
        ) from None
    if tuple(probe.ids for probe in probes) != trained.probes:
        raise ArtifactError(
            f"{witness.folder}: witness.json and {FINGERPRINT} have other probes",
            hint="files of two records are mixed: copy the folder again from the training machine",
        )
    base = _base(witness.folder, trained)
    return Reference(probes, _with_noise(witness.folder, trained), base, witness.facts, folder)


def _base(folder: Path, trained: Fingerprint) -> Fingerprint | None:
    """Load the base's log-probabilities at the ids of the trained model, if there are any."""
    path = folder / BASE
    if not path.is_file():
        return None
    base = _load(path)
    if base.probes != trained.probes or not np.array_equal(base.ids, trained.ids):
        raise ArtifactError(f"{path} and {FINGERPRINT} score other tokens")
    return base


def _with_noise(record: Path, trained: Fingerprint) -> Fingerprint:
    """Add the noise of 16 bits that the trainer's process measured on the first probes."""
    if not (record / NOISE).is_file():
        return trained
    again = _load(record / NOISE)
    first, dtype = _part(trained, range(len(again.probes))), again.arithmetic
    return replace(trained, formats={dtype: drift(first, again, dtype).noise})


def _served(folder: Path) -> Reference:
    """Return the reference in a served folder: convert measured it at the trained model's ids."""
    path = folder / FINGERPRINT
    if read_manifest(folder).get("kind") != "served" or not path.is_file():
        raise ArtifactError(
            f"{folder}: no plumbline.witness, and not a folder that Plumbline served: nothing to "
            "compare a server with",
            hint=_NO_REFERENCE.format(source=typed("source", folder)),
        )
    trained = _load(path)
    require_informative(trained, str(path))
    probes = tuple(Probe(ids, "served", number) for number, ids in enumerate(trained.probes))
    base, facts = _base(folder, trained), {"tokens": token_facts(folder)}
    return Reference(probes, trained, base, facts, folder, tuple(_rendered(folder)))


def _rendered(folder: Path) -> Iterator[Probe]:
    """Yield the public conversations as a folder's chat template writes them, without token ids.

    Those that the template refuses are left out (Gemma takes no system prompt), and all of them if
    it writes the date.
    """
    if _DATE.search(template_of(folder)):
        return
    for number, turns in enumerate(CHATS):
        messages = [{"role": role, "content": content} for role, content in turns]
        with suppress(TemplateError):
            (text,) = prompts_of(folder, [messages])
            if text:
                yield Probe((), "chat", number, text)


def token_facts(folder: Path) -> dict[str, Any]:
    """Return tokens and generation settings of a served folder, under the keys of a witness."""
    names = ("config", "generation_config")
    files = {name: folder / f"{name}.json" for name in names}
    read = {name: read_json(file) if file.is_file() else {} for name, file in files.items()}
    return {"tokenizer": {}, **read}


def _load(path: Path) -> Fingerprint:
    """Load a fingerprint, and check that its arrays belong together."""
    loaded = Fingerprint.load(path)
    count = sum(len(probe) - 1 for probe in loaded.probes)
    shapes = loaded.ids.shape, loaded.logprobs.shape, loaded.top1.shape
    size = loaded.ids.size // max(count, 1)
    steps = loaded.steps is None or loaded.steps.shape == (count,)
    if not (count and size and steps and shapes == ((count, size), (count, size), (count,))):
        raise ArtifactError(f"{path}: {count} positions of probes, arrays of {shapes}")
    if np.isnan(loaded.logprobs).any() or (loaded.logprobs > 1e-3).any():
        raise ArtifactError(
            f"{path}: values that are not log-probabilities: the trained model computed NaN",
            hint="choose a checkpoint from before the training went wrong",
        )
    return loaded
