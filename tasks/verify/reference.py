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
from tasks.core.terminal import command
from tasks.drift.fingerprint import Fingerprint, drift, require_informative
from tasks.drift.witness import active_adapter, find_witness
from tasks.weights.files.documents import read_json, read_manifest
from tasks.weights.tokens.render_template import TemplateError
from tasks.weights.tokens.tokenizer import prompts_of, template_of
from tasks.witness.plumbline_witness.prints import BASE, FINGERPRINT, FOLDER, NOISE
from tasks.witness.plumbline_witness.probes import CALLED, CHATS, DATE, SCHEMA, TOOLS
from tasks.witness.plumbline_witness.probes import Probe as Recorded

SIBLINGS = 8
"""Most other models that are read."""
COMMON = 4
"""Fewest probes on which two models are compared."""


@dataclass(frozen=True)
class Probe(Recorded):
    """One token sequence of the reference, of kind "served" in a served folder.

    A conversation whose text alone is known has no ids.
    """

    turns: tuple[Mapping[str, Any], ...] | None = None  # None for those of `CHATS`
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
    """The trained model, as it was measured."""

    probes: tuple[Probe, ...]  # in the order of the fingerprints
    trained: Fingerprint
    base: Fingerprint | None = None  # without the adapter, at the same ids
    # `witness.json`; of a served folder, what its files tell under the same keys
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    unscored: tuple[Probe, ...] = ()  # conversations and texts whose tokens alone are known

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
        return str((self.facts.get("quantization") or {}).get("method", ""))

    @property
    def adapter(self) -> Mapping[str, Any]:
        """PEFT configuration of the active adapter; empty without one."""
        return active_adapter(self.facts)

    def token_settings(self, part: str) -> Mapping[str, Any]:
        """Return what the "tokenizer", "generation_config" or "config" says about tokens."""
        return (self.facts.get("tokens") or {}).get(part) or {}

    @property
    def every_end(self) -> list[int]:
        """Tokens that end a turn: the tokenizer's EOS first, then those of the settings."""
        ends = list[Any]()
        for part in ("tokenizer", "generation_config", "config"):
            value = self.token_settings(part).get("eos_token_id")
            ends += value if isinstance(value, list) else [value]
        return list(dict.fromkeys(end for end in ends if isinstance(end, int)))

    def siblings(self) -> list[tuple[str, Reference]]:
        """Return other models by name: checkpoints of the same training, then other trainings.

        They have a readable record of `COMMON` of the same probes, beside this folder or in it; the
        nearest step comes first.
        """
        here, step = self.folder.resolve(), self.facts.get("step", 0)
        folders = {
            path.parent for root in (here.parent, here) for path in root.glob(f"*/{FOLDER}")
        } - {here}

        def distance(folder: Path) -> tuple[float, Path]:
            match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
            return (abs(int(match[1]) - step) if match else math.inf), folder

        siblings: list[tuple[str, Reference]] = []
        for folder in sorted(folders, key=distance):
            with suppress(PlumblineError, OSError):
                sibling = read_reference(folder)
                again = np.array_equal(sibling.trained.logprobs, self.trained.logprobs)
                if not again and len({*sibling.sequences} & {*self.sequences}) >= COMMON:
                    siblings.append((folder.name, sibling))
        return siblings[:SIBLINGS]

    def shared(self, other: Reference) -> tuple[list[int], Fingerprint]:
        """Return the numbers of the probes that another reference has too, and its print of them.

        The print has these probes alone, in the order of the numbers.
        """
        theirs = {ids: number for number, ids in enumerate(other.sequences)}
        common = [number for number, ids in enumerate(self.sequences) if ids in theirs]
        return common, _part(other.trained, [theirs[self.sequences[number]] for number in common])


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
    if folder.name == FOLDER:
        folder = folder.resolve().parent
    witness = find_witness(folder)
    if witness is None:
        return _served(folder)
    if witness.measured.name != FINGERPRINT:
        raise ArtifactError(
            f"{witness.folder}: scores of a reward model; verify compares log-probabilities",
            hint=f"serve it by `{command('deliver')}`, which compares its scores in the engine",
        )
    trained = _load(witness.measured)
    try:
        probes = tuple(
            Probe(tuple(entry["ids"]), entry["kind"], entry["number"], entry.get("text"))
            for entry in witness.facts["probes"]
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{witness.folder}/witness.json: unreadable: {error!r}") from None
    if tuple(probe.ids for probe in probes) != trained.probes:
        raise ArtifactError(
            f"{witness.folder}: witness.json and {FINGERPRINT} have other probes",
            hint="files of two records are mixed: copy the folder again from the training machine",
        )
    if (witness.folder / NOISE).is_file():  # that of 16 bits, on the first probes
        again = _load(witness.folder / NOISE)
        first, dtype = _part(trained, range(len(again.probes))), again.arithmetic
        trained = replace(trained, formats={dtype: drift(first, again, dtype).noise})
    base, text = _base(witness.folder, trained), witness.facts.get("text_with_tools")
    return Reference(probes, trained, base, witness.facts, folder, _with_tools(text))


def _served(folder: Path) -> Reference:
    """Return the reference in a served folder: convert measured it at the trained model's ids."""
    path = folder / FINGERPRINT
    if read_manifest(folder).get("kind") != "served" or not path.is_file():
        deliver = command("deliver", source=folder, base="<the base>", out="<a new folder>")
        raise ArtifactError(
            f"{folder}: no {FOLDER}, and not a folder that Plumbline served: nothing to compare a "
            "server with",
            hint="train with `python -m plumbline_witness -- <your training command>`, which "
            "records what a server is compared with; or make a served folder: "
            f"`{deliver}`, and give that as source",
        )
    trained = _load(path)
    probes = tuple(Probe(ids, "served", number) for number, ids in enumerate(trained.probes))
    base, facts = _base(folder, trained), {"tokens": token_facts(folder)}
    return Reference(probes, trained, base, facts, folder, tuple(_rendered(folder)))


def _load(path: Path) -> Fingerprint:
    """Load the fingerprint of a trained model. Raises ArtifactError if it computed NaN."""
    loaded = Fingerprint.load(path)
    if np.isnan(loaded.logprobs).any():
        raise ArtifactError(
            f"{path}: values that are not log-probabilities: the trained model computed NaN",
            hint="choose a checkpoint from before the training went wrong",
        )
    require_informative(loaded, str(path))
    return loaded


def _base(folder: Path, trained: Fingerprint) -> Fingerprint | None:
    """Load the base's log-probabilities at the ids of the trained model, if there are any."""
    path = folder / BASE
    if not path.is_file():
        return None
    base = Fingerprint.load(path)
    if base.probes != trained.probes or not np.array_equal(base.ids, trained.ids):
        raise ArtifactError(f"{path} and {FINGERPRINT} score other tokens")
    return base


def _rendered(folder: Path) -> Iterator[Probe]:
    """Yield the public conversations as a folder's chat template writes them, without token ids.

    Those that the template refuses are left out (Gemma takes no system prompt), and all of them if
    it writes the date.
    """
    if DATE.search(template_of(folder)):
        return
    for number in range(len(CHATS)):
        probe = Probe((), "chat", number)
        with suppress(TemplateError):
            (text,) = prompts_of(folder, [list(probe.messages or ())])
            if text:
                yield replace(probe, text=text)
    with suppress(TemplateError):
        (text,) = prompts_of(folder, [CALLED], tools=TOOLS)
        yield from _with_tools(text)


def _with_tools(text: str | None) -> tuple[Probe, ...]:
    """Return the public conversation with tools; a template that drops them writes no schema."""
    if SCHEMA not in (text or ""):
        return ()
    return (Probe((), "chat", len(CHATS), text, turns=CALLED, tools=TOOLS),)


def token_facts(folder: Path) -> dict[str, Any]:
    """Return tokens and generation settings of a served folder, under the keys of a witness."""
    files = {name: folder / f"{name}.json" for name in ("config", "generation_config")}
    settings = {name: read_json(file) for name, file in files.items() if file.is_file()}
    return {"tokenizer": {}, **settings}
