"""Headers: what cannot be read, what is empty, and whether names and shapes are the class's.

The contract is `tasks.weights.families.plain`: of a decoder of the common families config.json
tells every tensor, in milliseconds. Others are held against transformers on the meta device only
with `values=true` (see `contract.py`), since importing it takes longer than a look at headers may.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tasks.audit.catalogue import headers as say
from tasks.audit.checks.duplicate_formats import whole_beside
from tasks.audit.checks.quantisation import is_said_elsewhere
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source
from tasks.audit.weights import Weights
from tasks.weights.families.counts import oversized
from tasks.weights.families.plain import plain_facts
from tasks.weights.heads.absence import OPENRLHF, module_names
from tasks.weights.heads.normalisation import BUFFERS
from tasks.weights.pickled.state import unnesting

_LFS = b"version https://git-lfs"
_LM_HEAD = "lm_head.weight"
_VOCABULARY = ("model.embed_tokens.weight", _LM_HEAD)
_LEFT_BY_OLD = ("rotary_emb.inv_freq",)
"""Buffers that transformers 4 saved; every loader knows to leave them out."""
_BY_TYPE = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip


def check(source: Source) -> Iterator[Finding]:
    """File by file, then all tensors against the contract."""
    yield from _files(source, source.weights)
    yield from _empty(source)
    if source.is_model:
        yield from against_plain(source)


def _fix(source: Source) -> str:
    """What mends weights that are not whole; "" for what the catalogue says."""
    other = whole_beside(source)
    if not other:
        return ""
    return (
        f"python flows/audit.py source=DIR fix=true out_dir=<a new folder>: takes {other}, which "
        "is whole"
    )


def _files(source: Source, weights: Weights) -> Iterator[Finding]:
    fix = _fix(source)
    for name, reason in weights.unread.items():
        if _is_pointer(source, name):
            size = source.folder.files[name]
            yield say.NOT_WEIGHTS_YET.at(
                name, found=f"a pointer of {size} bytes", expected="weights"
            )
        else:
            yield say.BAD_HEADER.at(name, found=reason, expected="a whole file of tensors", fix=fix)
    holders = {one.file for one in weights.tensors.values()} | {one for _, _, one in weights.twice}
    for name, key in weights.nested.items():
        yield say.NESTED_STATE_DICT.at(
            name, found=f"the state dict under the key {key!r}", expected="tensors at the top",
            fix=unnesting(source.folder.root / name, key),
        )  # fmt: skip
    for name in weights.files:
        if name not in holders and not {name} & (weights.unread.keys() | weights.nested.keys()):
            size = source.folder.files[name]
            yield say.NO_TENSORS.at(
                name, found=f"{size} bytes, no tensor", expected="the trained tensors", fix=fix
            )
    for name, others in weights.others.items():
        if others:
            yield say.NO_TENSOR_ENTRY.at(name, others, found="no tensors", expected="tensors alone")


def _is_pointer(source: Source, name: str) -> bool:
    with (source.folder.root / name).open("rb") as file:
        return file.read(len(_LFS)) == _LFS


def _empty(source: Source) -> Iterator[Finding]:
    empty: dict[str, list[str]] = {}
    strided: dict[str, list[str]] = {}
    for key, one in source.tensors.items():
        if one.numel == 0:
            empty.setdefault(one.file, []).append(key)
        elif one.start < 0:
            strided.setdefault(one.file, []).append(key)
    for file, keys in empty.items():
        count = sum(one.file == file for one in source.tensors.values())
        shape = list(source.tensors[keys[0]].shape)
        yield say.EMPTY_TENSOR.at(
            file, keys, found=f"{len(keys)} of {count} tensors empty, shape {shape}",
            expected="a matrix, or a vector with elements", fix=_fix(source),
        )  # fmt: skip
    for file, keys in strided.items():
        yield say.NOT_CONTIGUOUS.at(
            file, keys, found=f"{len(keys)} with other strides", expected="C order"
        )


def against_plain(source: Source) -> Iterator[Finding]:
    """Names and shapes against what config.json says of a family of the table."""
    if not source.weights.is_whole or is_said_elsewhere(source):
        return  # what is absent is said already; what is packed has other names and shapes
    too_many = oversized(source.config())
    if too_many:  # the contract of so many is not even made
        yield say.TENSOR_MISSING.at(CONFIG, found=too_many, expected="as many as there are")
        return
    facts = plain_facts(_causal(source.config()), "bfloat16", None)
    if facts is None:
        return
    shapes = {one.name: one.shape for one in facts["tensors"]}
    optional = set(facts["tied"])
    if source.kind is Kind.REWARD:
        optional |= {_LM_HEAD, *BUFFERS}
        shapes.pop(_LM_HEAD, None)
    heads = {*module_names(source.config()), "v_head"} if source.kind is not Kind.MODEL else set()
    optional |= {key for key in source.tensors if key.partition(".")[0] in heads}
    yield from compare(source, shapes, optional)


def knows(source: Source) -> bool:
    """Whether the contract of this model is made here, without transformers."""
    return plain_facts(_causal(source.config()), "bfloat16", None) is not None


def _causal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration as if the model had a language model's head: the rest is the same."""
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        return {}
    name = names[0].replace("ForSequenceClassification", "ForCausalLM")
    if name in OPENRLHF:
        name = _BY_TYPE.get(str(config.get("model_type")), "")
    return {**config, "architectures": [name]}


def compare(
    source: Source, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str]
) -> Iterator[Finding]:
    """Findings of tensors that are missing, unknown or of another shape.

    Args:
        source: the model.
        shapes: of every tensor that the class has, by key on disk.
        optional: keys that may be there and need not.
    """
    held, what = source.tensors, f"the tensors of {_class(source)}"
    missing = [key for key in shapes if key not in held]
    unknown = [
        key for key in held
        if not (key in shapes or key in optional or key.endswith(_LEFT_BY_OLD))
    ]  # fmt: skip
    if missing:
        none = ": no key is as expected" if len(missing) == len(shapes) else ""
        count = f"{len(missing)} of {len(shapes)} missing{none}"
        yield say.TENSOR_MISSING.at("", missing, found=count, expected=what)
    if unknown:
        count = f"{len(unknown)} that the class does not have"
        severity = Severity.ERROR if missing else None
        yield say.TENSOR_UNEXPECTED.at(
            held[unknown[0]].file, unknown, found=count, expected=what, severity=severity
        )
    yield from _shapes(source, shapes)


def _shapes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """One finding for all tensors with the same mistake: a wrong size shows in every layer."""
    wrong: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for key, shape in shapes.items():
        one = source.tensors.get(key)
        if one is None or not one.numel or one.shape == shape:
            continue
        if key in _VOCABULARY and one.shape[1:] == shape[1:]:
            continue  # rows of the vocabulary are a family of their own
        wrong.setdefault((one.shape, shape), []).append(key)
    for (found, due), keys in wrong.items():
        yield say.SHAPE_MISMATCH.at(
            source.tensors[keys[0]].file, keys, found=str(list(found)), expected=str(list(due))
        )


def _class(source: Source) -> str:
    return str(source.config()["architectures"][0])
