"""The product's tables of transformers agree with the installed version.

Update them with `REGENERATE=1 python -m pytest tests/audit/test_known.py`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import tasks.audit

AUDIT = Path(tasks.audit.__file__).parent
_HEADS = ("CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")


def classes_of_transformers() -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    classes: dict[str, set[str]] = {}
    for head in _HEADS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            classes.setdefault(kind, set()).update([names] if isinstance(names, str) else names)
    return {
        "version": version("transformers"),
        "classes": {kind: sorted(names) for kind, names in sorted(classes.items())},
    }


_PARAMETERS = (
    "add_prefix_space", "legacy", "do_lower_case", "tokenize_chinese_chars", "strip_accents",
    "remove_space", "keep_accents", "split_by_punct"
)  # fmt: skip
"""Settings of tokenizer_config.json that change what a class builds."""
_STUB = (
    "<s>", "<pad>", "</s>", "<unk>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "<mask>",
    "<|endoftext|>", "a"
)  # fmt: skip


def _names() -> set[str]:
    """Return the names of all tokenizer classes of transformers, by the text of its modules."""
    import transformers
    from transformers.models.auto import tokenization_auto as auto

    names = set(filter(None, auto.TOKENIZER_MAPPING_NAMES.values()))
    for path in (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py"):
        text = path.read_text()
        names |= set(re.findall(r"^class (\w+)\(", text, re.MULTILINE))
        names |= set(re.findall(r"^(\w+Tokenizer\w*) = ", text, re.MULTILINE))
    return names


def _rebuilding() -> dict[str, type[Any]]:
    """Return the classes that build their own pipeline and take only the vocabulary, by name."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    classes = {}
    for name in sorted(_names()):
        try:
            made = tokenizer_class_from_name(name)
        except Exception:
            continue
        fast = isinstance(made, type) and issubclass(made, TokenizersBackend)
        if fast and made is not TokenizersBackend and "__init__" in made.__dict__:
            classes[name] = made
    return classes


def _charsmap() -> bytes:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as messages

    model: Any = vars(messages)["ModelProto"]()
    rules = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc")
    model.ParseFromString(rules.serialized_model_proto())
    return bytes(model.normalizer_spec.precompiled_charsmap)


def _built(made: type[Any], settings: dict[str, bool], charsmap: bytes) -> dict[str, Any]:
    """Return the pipeline that a class builds, without vocabulary and without the charsmap."""
    kind = getattr(made.model, "__name__", None)
    names = inspect.signature(made.__init__).parameters
    more: dict[str, Any] = {"merges": []} if kind == "BPE" else {}
    if "_spm_precompiled_charsmap" in names:
        more["_spm_precompiled_charsmap"] = charsmap
    scored = kind in ("Unigram", None)
    vocabulary = [(text, 0.0) for text in _STUB] if scored else {t: i for i, t in enumerate(_STUB)}
    tokenizer = made(vocab=vocabulary, **more, **settings)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {k: v for k, v in document["model"].items() if k not in ("vocab", "merges")}
    steps = {step: _without_charsmap(document[step]) for step in ("normalizer", "pre_tokenizer")}
    return {"model": model, **steps}


def _without_charsmap(step: Any) -> Any:
    if isinstance(step, dict):
        if step.get("type") == "Precompiled":
            return {"type": "Precompiled"}
        return {key: _without_charsmap(value) for key, value in step.items()}
    return [_without_charsmap(value) for value in step] if isinstance(step, list) else step


def tokenizers_of_transformers() -> dict[str, Any]:
    from transformers.models.auto import tokenization_auto as auto

    pipelines: list[Any] = []
    built: dict[str, dict[str, int]] = {}
    classes, charsmap = _rebuilding(), _charsmap()
    for made in classes.values():
        if made.__name__ in built:
            continue
        variants: dict[str, int] = {}
        names = [n for n in _PARAMETERS if n in inspect.signature(made.__init__).parameters]
        for values in itertools.product((None, False, True), repeat=len(names)):
            chosen = {n: v for n, v in zip(names, values, strict=True) if v is not None}
            try:
                pipeline = _built(made, chosen, charsmap)
            except TypeError:  # two classes, of web pages and of Chinese words, need more
                break
            if pipeline not in pipelines:
                pipelines.append(pipeline)
            number = pipelines.index(pipeline)
            if not chosen or number != variants[""]:
                variants[json.dumps(chosen, sort_keys=True) if chosen else ""] = number
        built[made.__name__] = variants
    built = {name: variants for name, variants in built.items() if variants}
    registered = {kind: name for kind, name in auto.TOKENIZER_MAPPING_NAMES.items() if name}
    readers = {"TokenizersBackend", "MistralCommonBackend"}
    return {
        "version": version("transformers"),
        "registered": {
            kind: "TokenizersBackend" if name in readers else name.removesuffix("Fast")
            for kind, name in sorted(registered.items())
        },
        "not_of_config": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "classes": {n: made.__name__ for n, made in classes.items() if made.__name__ in built},
        "built": built,
        "pipelines": pipelines,
    }


def table(document: dict[str, Any]) -> str:
    """Return JSON with one model type, one class, or one pipeline on a line."""
    parts = []
    for name, part in sorted(document.items()):
        text = json.dumps(part, sort_keys=True)
        if isinstance(part, dict):
            rows = (f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in part.items())
            text = "{\n" + ",\n".join(rows) + "\n }"
        elif isinstance(part, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(v, sort_keys=True)}" for v in part) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def assert_current(path: Path, installed: dict[str, Any]) -> None:
    """Compare a table with what the libraries have, or write it anew."""
    if os.environ.get("REGENERATE"):
        path.write_text(table(installed))
        pytest.skip(f"wrote {path}")
    assert json.loads(path.read_text()) == installed


def test_classes_of_models() -> None:
    assert_current(AUDIT / "known_classes.json", classes_of_transformers())


def test_classes_of_tokenizers() -> None:
    assert_current(AUDIT / "known_tokenizers.json", tokenizers_of_transformers())
