"""Check that loaders read tokenizer.json as it is, and compare it with the base's.

transformers 5 rebuilds the pipeline of the classes in `known_tokenizers.json`, which
`tests/audit/test_known.py` makes from the installed library. Importing it takes longer
than a whole audit, so a pipeline that differs is built by `tokenizers` alone, in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tasks.audit
from tasks.audit.catalogue.text import TokenIds
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZER
from tasks.audit.finding import Finding, Severity
from tasks.audit.source import Source
from tasks.weights.tokens.prove_ids import is_leading, misread_as

_READER = "TokenizersBackend"
_NO_CLASS = (
    "no class helps: transformers 5 builds the tokenizer of every {!r} itself. If training read "
    "tokenizer.json as it is, serve it with an engine that does, e.g. transformers 4; else save "
    "the tokenizer again with the transformers of the training, which writes the steps it used"
)


def check(source: Source) -> Iterator[Finding]:
    """Compare ids by the class and by the file, then the file with the base's."""
    if not (source.is_model or source.is_adapter) or TOKENIZER not in source.folder.files:
        return
    built = _built(source)
    if built and _parts(source.config(TOKENIZER)) != _parts(built):
        yield from _misread(source, built)
    base = source.base
    if base is not None and base.is_model and TOKENIZER in base.folder.files:
        yield from _against(source, base)


def _misread(source: Source, built: Mapping[str, Any]) -> Iterator[Finding]:
    if not source.config(TOKENIZER):
        return
    known, severity = find_spec("tokenizers") is not None, None
    reason = misread_as(source.folder.root, built) if known else "its steps are not the class's"
    if not known or is_leading(reason):
        severity = Severity.WARNING  # other steps may make the same ids; prompts have the same
    if reason:
        name = str(source.config(SETTINGS).get("tokenizer_class"))
        kind = _model_type(source)
        always = kind in _table()["not_of_config"]
        yield TokenIds.TOKENIZER_MISREAD.at(
            SETTINGS, "tokenizer_class", found=f"{name!r}: {reason}",
            expected="'PreTrainedTokenizerFast', which reads tokenizer.json", severity=severity,
            fix=_NO_CLASS.format(kind) if always else "",
        )  # fmt: skip


def _built(source: Source) -> Mapping[str, Any] | None:
    """Return the pipeline that transformers 5 builds; None if it reads the file."""
    table, settings = _table(), source.config(SETTINGS)
    if "auto_map" in settings:
        return None  # code of the model
    named = settings.get("tokenizer_class") or _config(source).get("tokenizer_class")
    short = named.removesuffix("Fast") if isinstance(named, str) else ""
    name = _loaded(_model_type(source), short)
    variants = table["built"].get(table["classes"].get(name, ""))
    if variants is None:
        return None
    parameters = {key for variant in variants if variant for key in json.loads(variant)}
    chosen = {key: settings[key] for key in sorted(parameters) if type(settings.get(key)) is bool}
    number = variants.get(json.dumps(chosen, sort_keys=True) if chosen else "", variants[""])
    pipeline: Mapping[str, Any] = table["pipelines"][number]
    return pipeline


def _config(source: Source) -> Mapping[str, Any]:
    """Return config.json of a model, or of an adapter's base."""
    return source.config() or (source.base.config() if source.base is not None else {})


def _model_type(source: Source) -> str:
    return str(_config(source).get("model_type", ""))


def _loaded(kind: str, named: str) -> str:
    """Return the class that AutoTokenizer takes, by the rules of transformers 5."""
    table = _table()
    registered = table["registered"].get(kind, "")
    if not named or not registered or registered == named:
        return named or registered
    if registered == _READER:
        return _READER
    return registered if kind in table["not_of_config"] else named


@cache
def _table() -> dict[str, Any]:
    path = Path(tasks.audit.__file__).with_name("known_tokenizers.json")
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def _parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the ids besides the vocabulary, in one form."""
    model = document.get("model")
    model = model if isinstance(model, Mapping) else {}
    options = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    if options.get("byte_fallback"):
        options.pop("unk_token", None)  # every character has bytes
    steps = {name: _plain(document.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return {**steps, "model": _plain(options)}


def _plain(step: Any) -> Any:
    if isinstance(step, list):
        return [_plain(part) for part in step]
    if not isinstance(step, Mapping):
        return step
    full = {"use_regex": True, **step} if step.get("type") == "ByteLevel" else step
    dropped = ("trim_offsets", "precompiled_charsmap")
    return {
        k: _plain(v) for k, v in full.items() if v not in (None, False, "") and k not in dropped
    }


def _against(source: Source, base: Source) -> Iterator[Finding]:
    """Report what a tokenizer changed of the base's; tokens may have been added."""
    ours_path, theirs_path = (s.folder.root / TOKENIZER for s in (source, base))
    if ours_path.read_bytes() == theirs_path.read_bytes():
        return
    ours, theirs = source.config(TOKENIZER), base.config(TOKENIZER)
    if not _is_tokenizer(ours) or not _is_tokenizer(theirs):
        return  # no loader takes it
    changed = list(_changes(ours, theirs, source.folder.root))
    if changed:
        yield TokenIds.TOKENIZER_NOT_OF_BASE.at(
            TOKENIZER, found="; ".join(changed), expected="as the base has; tokens may be added"
        )


def _changes(ours: Mapping[str, Any], theirs: Mapping[str, Any], root: Path) -> Iterator[str]:
    model, base = ours.get("model") or {}, theirs.get("model") or {}
    ids, base_ids = _ids(ours), _ids(theirs)
    moved = [text for text, number in base_ids.items() if ids.get(text) != number]
    if moved:
        text = moved[0]
        yield (
            f"{len(moved)} tokens have other ids or none, e.g. {text!r} {ids.get(text)}, not "
            f"{base_ids[text]}"
        )
    merges, base_merges = _merges(model), _merges(base)
    if merges != base_merges:
        yield f"{len(merges)} merges, not the base's {len(base_merges)}"
    if not moved and _parts(ours) != _parts(theirs):
        # Versions write the same steps in other ways: only other ids are a change.
        steps = {name: theirs.get(name) for name in ("normalizer", "pre_tokenizer")}
        options = {key: value for key, value in base.items() if key not in ("vocab", "merges")}
        reason = misread_as(root, {**steps, "model": options})
        if reason and not is_leading(reason):
            names = [n for n, step in _parts(ours).items() if step != _parts(theirs)[n]]
            yield f"another {' and '.join(names)}, by the base's {reason}"
    if _kinds(ours.get("decoder")) != _kinds(theirs.get("decoder")):
        yield "another decoder"


def _is_tokenizer(document: Mapping[str, Any]) -> bool:
    """Return True if a document has the parts of a tokenizer.json in their types."""
    model, added = document.get("model"), document.get("added_tokens") or []
    if not isinstance(model, Mapping) or not isinstance(added, list):
        return False
    vocabulary, merges = model.get("vocab"), model.get("merges") or []
    entries = vocabulary if isinstance(vocabulary, list) else []
    return (
        isinstance(vocabulary, (Mapping, list))
        and isinstance(merges, list)
        and all(isinstance(entry, list) and entry for entry in entries)
        and all(isinstance(pair, str | list) for pair in merges)
        and all(isinstance(token, Mapping) and "content" in token and "id" in token
                for token in added)
    )  # fmt: skip


def _kinds(step: Any) -> list[str]:
    """Return the kinds of a decoder's steps."""
    parts = step.get("decoders", [step]) if isinstance(step, Mapping) else []
    parts = parts if isinstance(parts, list) else []
    return [str(part.get("type")) for part in parts if isinstance(part, Mapping)]


def _ids(document: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    added = {str(token["content"]): token["id"] for token in document.get("added_tokens") or ()}
    return {**vocabulary, **added}


def _merges(model: Mapping[str, Any]) -> list[str]:
    """Return the merges as text; tokenizers wrote texts first, and writes pairs since 0.20."""
    merges = model.get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(map(str, pair)) for pair in merges]
