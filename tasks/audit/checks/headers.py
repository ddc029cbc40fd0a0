"""Check headers: unreadable files, empty tensors, and names and shapes of the model's class.

For decoders of common families `tasks.weights.families.plain` derives every tensor from config.json
in milliseconds. Other classes need transformers on the meta device, which is too slow to import
for an audit of headers: see `tasks.audit.class_contract`, which runs with `values=true`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tasks.audit.catalogue.tensors import Headers
from tasks.audit.checks.files import intact_beside
from tasks.audit.checks.quantisation import is_declared_elsewhere
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source
from tasks.audit.weights import Weights
from tasks.weights.families.counts import oversized
from tasks.weights.families.plain import plain_facts
from tasks.weights.files.names import without_wrappers
from tasks.weights.heads.absence import OPENRLHF, module_names
from tasks.weights.heads.normalisation import BUFFERS
from tasks.weights.pickled.state import unnesting

_LFS = b"version https://git-lfs"
_LM_HEAD = "lm_head.weight"
_VOCABULARY = ("model.embed_tokens.weight", _LM_HEAD)
_LEFT_BY_OLD = ("rotary_emb.inv_freq",)
"""Buffers that transformers 4 saved; every loader skips them."""
_BY_TYPE = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip


def check(source: Source) -> Iterator[Finding]:
    """Check each file, then all tensors against the class."""
    yield from _files(source, source.weights)
    yield from _empty(source)
    if source.is_model:
        yield from against_plain(source)


def _fix(source: Source) -> str:
    """Return the command that repairs broken weights; "" for the advice of the catalogue."""
    intact = intact_beside(source)
    command = "python flows/audit.py source=DIR fix=true out_dir=<a new folder>"
    return f"{command}: uses {intact}, which is intact" if intact else ""


def _files(source: Source, weights: Weights) -> Iterator[Finding]:
    fix = _fix(source)
    for name, reason in weights.unread.items():
        with (source.folder.root / name).open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
        if is_pointer:
            pointer = f"a pointer of {source.folder.files[name]} bytes"
            yield Headers.NOT_WEIGHTS_YET.at(name, found=pointer, expected="weights")
        else:
            yield Headers.BAD_HEADER.at(
                name, found=reason, expected="an intact file of tensors", fix=fix
            )
    holders = {tensor.file for tensor in weights.tensors.values()}
    holders |= {file for _, _, file in weights.twice}
    for name, key in weights.nested.items():
        yield Headers.NESTED_STATE_DICT.at(
            name, found=f"the state dict under the key {key!r}", expected="tensors at top level",
            fix=unnesting(source.folder.root / name, key),
        )  # fmt: skip
    for name in weights.files:
        if name not in holders and not {name} & (weights.unread.keys() | weights.nested.keys()):
            size = source.folder.files[name]
            yield Headers.NO_TENSORS.at(
                name, found=f"{size} bytes, no tensors", expected="the trained tensors", fix=fix
            )
    for name, others in weights.others.items():
        if others:
            yield Headers.NO_TENSOR_ENTRY.at(
                name, others, found="not tensors", expected="only tensors"
            )


def _empty(source: Source) -> Iterator[Finding]:
    empty: dict[str, list[str]] = {}
    strided: dict[str, list[str]] = {}
    for key, tensor in source.tensors.items():
        if tensor.numel == 0:
            empty.setdefault(tensor.file, []).append(key)
        elif tensor.start < 0:
            strided.setdefault(tensor.file, []).append(key)
    for file, keys in empty.items():
        count = sum(tensor.file == file for tensor in source.tensors.values())
        shape = list(source.tensors[keys[0]].shape)
        yield Headers.EMPTY_TENSOR.at(
            file, keys, found=f"{len(keys)} of {count} tensors empty, shape {shape}",
            expected="a matrix, or a vector with elements", fix=_fix(source),
        )  # fmt: skip
    for file, keys in strided.items():
        yield Headers.NOT_CONTIGUOUS.at(
            file, keys, found=f"{len(keys)} with other strides", expected="C order"
        )


def against_plain(source: Source) -> Iterator[Finding]:
    """Compare names and shapes with config.json, for families of the table."""
    if not source.weights.is_whole or is_declared_elsewhere(source):
        return  # missing files are reported; packed weights have other names and shapes
    too_many = oversized(source.config())
    if too_many:  # the config announces more tensors than any model has
        yield Headers.TENSOR_MISSING.at(
            CONFIG, found=too_many, expected="a plausible number of tensors"
        )
        return
    facts = plain_facts(_causal(source.config()), "bfloat16", None)
    if facts is None:
        return
    shapes = {tensor.name: tensor.shape for tensor in facts["tensors"]}
    optional = set(facts["tied"])
    if source.kind is Kind.REWARD:
        optional |= {_LM_HEAD, *BUFFERS}
        shapes.pop(_LM_HEAD, None)
    heads = {*module_names(source.config()), "v_head"} if source.kind is not Kind.MODEL else set()
    optional |= {key for key in source.tensors if key.partition(".")[0] in heads}
    yield from compare(source, shapes, optional)


def knows(source: Source) -> bool:
    """Return True if this module can derive the tensors of the model, without transformers."""
    return plain_facts(_causal(source.config()), "bfloat16", None) is not None


def _causal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with a language model's head; its other tensors are the same."""
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
    """Report tensors that are missing, unknown or of another shape.

    Args:
        source: the model.
        shapes: shape of every tensor of the class, by key on disk.
        optional: keys that may be absent.
    """
    what = f"the tensors of {source.config()['architectures'][0]}"
    tensors = without_wrappers(source.tensors)  # `wrapper_prefixes` reports these
    missing = [key for key in shapes if key not in tensors]
    unknown = [
        key for key in tensors
        if not (key in shapes or key in optional or key.endswith(_LEFT_BY_OLD))
    ]  # fmt: skip
    if missing:
        none = ": no key is as expected" if len(missing) == len(shapes) else ""
        count = f"{len(missing)} of {len(shapes)} missing{none}"
        yield Headers.TENSOR_MISSING.at("", missing, found=count, expected=what)
    count = f"{len(unknown)} that the class does not have"
    severity = Severity.ERROR if missing else None
    yield from Headers.TENSOR_UNEXPECTED.of(
        source, unknown, found=count, expected=what, severity=severity
    )
    yield from _shapes(source, shapes)


def _shapes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Report wrong shapes: one finding per mistake, since a wrong size shows in every layer."""
    wrong: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for key, shape in shapes.items():
        tensor = source.tensors.get(key)
        if tensor is None or not tensor.numel or tensor.shape == shape:
            continue
        if key in _VOCABULARY and tensor.shape[1:] == shape[1:]:
            continue  # `text.vocabulary` checks these rows
        wrong.setdefault((tensor.shape, shape), []).append(key)
    for (actual, expected), keys in wrong.items():
        yield from Headers.SHAPE_MISMATCH.of(
            source, keys, found=str(list(actual)), expected=str(list(expected))
        )
