"""Repair a checkpoint without loss, as a new artifact: `repaired = repair(folder, out)`.

Each finding carries its repair, a function of the draft. A draft becomes a `Source` again, so that
the checks run on it as on a folder: a repair that would not help is never written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.audit.check import CANNOT_GO_ON, Finding, errors_of, examine
from tasks.audit.folder import Folder, Listing, Weights
from tasks.audit.scan import differ
from tasks.audit.source import CONFIG, Recognised, Source, open_source
from tasks.core.errors import ConfigError, ContractError, first_and_more
from tasks.core.private import open_up
from tasks.pipeline.artifact import SIGNATURE, Artifact, Origin, publish, staging
from tasks.weights.execute.execute import execute
from tasks.weights.files.documents import MANIFEST
from tasks.weights.files.names import PEFT_PREFIX, unwrap
from tasks.weights.files.reader import index_of
from tasks.weights.files.side_files import copy_side_file
from tasks.weights.files.source import Renamed
from tasks.weights.heads import WRAPPER as TRL_WRAPPER
from tasks.weights.plan import Plan, as_is
from tasks.weights.validate import validate

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_NOT_COPIED = (*_PICKLES, ".safetensors", ".index.json")
_MAX_SHARD_BYTES = 5_000_000_000
_SHOWN = 50
_INPUT = "source"


@dataclass
class Draft:
    """The planned content of a repaired folder.

    Attributes:
        source: the folder as it is, with the set of weights to use.
        names: old key by new key.
        documents: JSON files to write, and templates as texts.
        done: descriptions of the changes, one line each.
        refused: reasons why something cannot be repaired, one line each.
    """

    source: Source
    names: dict[str, str]
    documents: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> Renamed:
        """The tensors under their new names."""
        return Renamed(self.source, self.names)

    def edit(self, name: str, **changes: Any) -> None:
        """Change fields of a JSON file."""
        before = self.documents.get(name, dict(self.source.config(name)))
        self.documents[name] = {**before, **changes}

    def copied(self) -> list[str]:
        """Return the files to copy: all but the weights, and in subfolders all but pickles."""
        return [
            name for name in self.source.folder.files
            if not name.endswith(_PICKLES if "/" in name else _NOT_COPIED)
            and name not in (MANIFEST, SIGNATURE, *self.documents)
            and not any(part.startswith(".") for part in name.split("/"))
        ]  # fmt: skip

    def as_source(self) -> Source:
        """Return the draft as a source, for the checks of headers and documents."""
        before, folder = self.source.recognised, self.source.folder
        weights = _weights(before.weights, self.names)
        files = {name: folder.files[name] for name in self.copied()}
        files |= dict.fromkeys(self.documents, 1)
        files |= {name: folder.files[name] for name in weights.files}
        documents = dict(self.documents)
        if weights.index is not None:
            total = {"metadata": {"total_size": weights.nbytes}, "weight_map": dict(weights.index)}
            documents[index_of(weights.single)] = total
            files[index_of(weights.single)] = 1
        texts = {name: text for name, text in self.documents.items() if isinstance(text, str)}
        seen = folder.listing
        listing = Listing(files, seen.folders, {}, seen.unsafe)
        return replace(
            self.source, values=False, planned=False,
            folder=Folder(folder.root, _documents=documents, _texts=texts, _listing=listing),
            recognised=Recognised(before.kind, before.what, weights),
        )  # fmt: skip


def _weights(before: Weights, names: Mapping[str, str]) -> Weights:
    """Return the weights with renamed tensors, and an index for them."""
    tensors = {new: before.tensors[old] for new, old in names.items()}
    single = before.single.rpartition(".")[0].replace("pytorch_model", "model") + ".safetensors"
    several = len(before.files) > 1
    return replace(
        before, single=single, tensors=tensors, others={},
        index={key: tensor.file for key, tensor in tensors.items()} if several else None,
        files=tuple(dict.fromkeys(tensor.file for tensor in tensors.values())),
    )  # fmt: skip


def drafted(source: Source, findings: Sequence[Finding]) -> Draft:
    """Return the draft of a repair: each finding's own, once."""
    draft = Draft(source, {key: key for key in source.tensors})
    for repair in dict.fromkeys(finding.repair for finding in findings if finding.repair):
        repair(draft)
    altered = [finding for finding in findings if finding.code == "MANIFEST_DIFFERS"]
    draft.refused += [f"{finding.code}: {finding.found}" for finding in altered]
    return draft


def is_repairable(source: Source, findings: Sequence[Finding]) -> bool:
    """Return True if a repair leaves no errors, as far as headers and JSON files tell."""
    wrong = errors_of(findings)
    if not wrong or not (source.is_model or source.is_adapter):
        return False
    try:
        if source.is_read:
            by_headers = errors_of(examine(replace(source, values=False, planned=False)))
            codes = {finding.code for finding in by_headers}
            if any(finding.code not in codes and not finding.repair for finding in wrong):
                return False  # a repair does not change tensor data
        draft = drafted(source, findings)
        if draft.refused or not draft.done:
            return False
        return not errors_of(examine(draft.as_source()))
    except CANNOT_GO_ON:
        return False  # malicious files, which have findings of their own


_INFIX = re.compile(r"\.base_layer\.|\.modules_to_save\.[^.]+\.")
_ORIGINAL = ".original_module."
"""Part of the key of an untrained copy, which PEFT keeps beside a module of `modules_to_save`."""
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")
_NAMED = (
    (re.compile(r"(?P<at>.+\.lora_[AB])\.(?!(?:weight|bias)$)[^.]+(?P<tail>\.weight|\.bias)"),
     r"\g<at>\g<tail>"),
    (re.compile(r"(?P<at>.+\.lora_embedding_[AB])\.[^.]+"), r"\g<at>"),
    (re.compile(r"(?P<at>.+\.lora_magnitude_vector)\.[^.]+(\.weight)?"), r"\g<at>"),
    (re.compile(r"(?P<at>.+)\.modules_to_save\.[^.]+(?P<tail>\.(weight|bias))"), r"\g<at>\g<tail>"),
    (re.compile(r"(?P<at>.+\.trainable_tokens_delta)\.[^.]+"), r"\g<at>"),
)  # fmt: skip
"""Pattern of a key of a PEFT model in memory, and the key in its file."""


def strip_prefixes(draft: Draft) -> None:
    """Remove wrapper prefixes from every name; refuse if two tensors would share a name."""
    is_adapter = draft.source.is_adapter
    if not is_adapter:
        lora = [key for key in draft.names if _LORA.search(key)]
        if lora:
            draft.refused.append(
                f"{lora[0]}: the adapter was never merged into these weights: save it as an "
                "adapter, and deliver that with its base"
            )
            return
        for key in [key for key in draft.names if _ORIGINAL in key]:
            del draft.names[key]
            draft.done.append(f"{key}: left out, the trained copy is kept")
    names: dict[str, str] = {}
    for new, old in draft.names.items():
        clean = adapter_name(new) if is_adapter else model_name(new)
        if clean in names:
            draft.refused.append(f"{old} and {names[clean]}: both would be named {clean}")
        names[clean] = old
    changed = [(old, new) for new, old in names.items() if new != old]
    if changed:
        old, new = changed[0]
        draft.done.append(f"{len(changed)} keys without wrapper prefixes: {old} is now {new}")
    draft.names = names


def model_name(key: str) -> str:
    """Return the key of a model's tensor without prefixes of wrappers, TRL and PEFT."""
    plain = unwrap(key).removeprefix(TRL_WRAPPER)
    return _INFIX.sub(".", unwrap(plain).removeprefix(PEFT_PREFIX))


def adapter_name(key: str) -> str:
    """Return the key of an adapter's tensor as PEFT saves it."""
    plain = unwrap(key)
    if "v_head." in plain:
        return plain
    for live, kept in _NAMED:
        match = live.fullmatch(plain)
        if match:
            plain = match.expand(kept)
    return plain if plain.startswith(PEFT_PREFIX) else f"{PEFT_PREFIX}{plain}"


def settle_tie(head: str, embedding: str) -> Callable[[Draft], None]:
    """Return the repair of a tied output embedding on disk: drop the copy, or untie the two."""

    def repair(draft: Draft) -> None:
        names = {model_name(name): name for name in draft.names}
        ours, theirs = draft.names[names[head]], draft.names[names[embedding]]
        first, second = draft.source.tensors[ours], draft.source.tensors[theirs]
        same = (first.shape, first.dtype) == (second.shape, second.dtype)
        if same and not differ((draft.source, ours), (draft.source, theirs)):
            del draft.names[names[head]]
            draft.done.append(f"{head}: left out, it equals {embedding} byte for byte")
        else:
            draft.edit(CONFIG, tie_word_embeddings=False)
            draft.done.append(f"{CONFIG}: tie_word_embeddings is false: the two differ")

    return repair


@dataclass(frozen=True)
class Repaired:
    """The result of a repair.

    Attributes:
        artifact: the new folder.
        done: descriptions of the changes, one line each.
        findings: remaining findings, none of them an error.
    """

    artifact: Artifact
    done: tuple[str, ...]
    findings: tuple[Finding, ...]


def repair(root: Path, out: Path, *, base: Path | None = None) -> Repaired:
    """Write a repaired copy of a folder, which is only read, to an absent or empty folder.

    Raises:
        ConfigError: `out` is not empty, or there is nothing to repair.
        ContractError: something cannot be repaired without inventing data; lists every reason.
        ArtifactError: a file cannot be read or written.
    """
    _require_free(root, out)
    source = open_source(root, base, values=False)
    findings = examine(source)
    if not (source.is_model or source.is_adapter):
        raise ContractError(
            f"{root}: {source.recognised.what}: only models and adapters are repaired",
            details=_lines(errors_of(findings)),
        )
    draft = drafted(source, findings)
    errors = errors_of(examine(draft.as_source()))
    reasons = draft.refused or _lines(errors)  # refused repairs cause the remaining errors
    if reasons:
        raise ContractError(
            f"{root}: not everything can be repaired without loss: {first_and_more(reasons)}",
            details=reasons[:_SHOWN],
            hint="" if draft.refused else errors[0].fix,
        )
    if not draft.done:
        raise ConfigError(f"{root}: there is nothing to repair")
    return _write(draft, out)


def _write(draft: Draft, out: Path) -> Repaired:
    kind, stem = ("adapter", "adapter_model") if draft.source.is_adapter else ("weights", "model")
    tensors = draft.tensors
    plan = Plan(as_is(tensors, _INPUT).ops, max_shard_bytes=_MAX_SHARD_BYTES)
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as work:
        validate(plan, {_INPUT: tensors}, out=work)
        execute(plan, {_INPUT: tensors}, work, stem=stem)
        folder, copied = draft.source.folder, draft.copied()
        for name in copied:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            copy_side_file(folder.root / name, work / name, folder.root)
        lost = [name for name in folder.files if "/" in name and name not in copied]
        draft.done += [f"left out {first_and_more(lost)}"] if lost else []
        for name, document in draft.documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            (work / name).write_text(document if isinstance(document, str) else text, newline="")
        base = draft.source.base
        root = base.folder.root if base is not None else None
        findings = examine(open_source(work, root, values=False))
        errors = errors_of(findings)
        if errors:  # the draft had none, so the files differ from the draft
            raise ContractError(
                f"{out}: the repaired copy differs from the plan", details=_lines(errors)
            )
        if out.is_dir():
            out.rmdir()  # else `publish` would treat the empty folder as an older artifact
        notes = {"repaired": draft.done}
        artifact = publish(work, out, Origin(kind, "audit", out.name, notes=notes))
    open_up(out)
    return Repaired(artifact, tuple(draft.done), tuple(findings))


def _require_free(root: Path, out: Path) -> None:
    if out.resolve().is_relative_to(root.resolve()) or root.resolve().is_relative_to(out.resolve()):
        raise ConfigError(
            f"out_dir={out} and source={root}: one contains the other; the source is never changed",
            hint="out_dir=<a folder elsewhere>",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out_dir={out} is not empty", hint="out_dir=<a new folder>")


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{finding.code}: {finding.where}: {finding.found} -> {finding.fix}" for finding in findings
    ]
