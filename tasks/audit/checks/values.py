"""Values, by themselves and against the base that a model or an adapter should come from.

Weights up to 2 GB are read, larger ones with values=true.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.audit.check import ADAPTER, ERROR, MODEL, READ, WARNING, Fault, check, some
from tasks.audit.checks.adapter import has_settings, pattern_of
from tasks.audit.checks.names import other_sizes
from tasks.audit.known import embeddings_of, of_text, whole
from tasks.audit.scan import differ, first_difference, same_header, scan
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Source
from tasks.weights.files.dtypes import is_float, widened
from tasks.weights.files.folder import base_mismatch
from tasks.weights.files.tensors import Reader, Tensor
from tasks.weights.lora import FACTOR

_LEAST, _COSINE = 0.5, 0.5
"""Least ratio of norms, and least median cosine, of a trained model's matrices to its base's.
Other models of the same shape have a cosine near 0."""
_TURNED = 0.2
"""Cosine below which a single matrix is another one: transposed, swapped, or initialised again."""
_BLOCK, _BLOCKS = 1 << 19, 4
"""Elements to read at a time, and the most blocks of a tensor, evenly spread."""
_HUB = 3
"""Last parts of a path to compare: hub caches use models--Qwen--Qwen3-8B/snapshots/<commit>."""


@check(
    "WRONG_BASE", ERROR,
    why="shapes that agree raise no error: correct before the merge, garbage after it",
    fix="pass the base that the training run used, and name it in adapter_config.json",
    issues="LLaMA-Factory #4913, LLaMA-Factory #2505, LLaMA-Factory #5930, LLaMA-Factory #6105",
)  # fmt: skip
def wrong_base(source: Source) -> Iterator[Fault]:
    """Not made from this base, or by the names from another one."""
    base, name = source.base, source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    if has_settings(source) and not name:
        yield Fault("no base_model_name_or_path", "the base's name", ADAPTER_CONFIG, (), WARNING)
    if base is None:
        return
    if not base.is_model:
        text, root = f"{base.what}; nothing was compared with it", base.root
        fix = "base=<folder of the full model that it was made from>"
        yield Fault(text, "a full model", file=str(root), fix=fix)
    elif has_settings(source):
        inputs = source.manifest.get("inputs")
        digest = inputs.get("base") if isinstance(inputs, Mapping) else None
        reason = source.is_adapter and base_mismatch(  # by the rules of a delivery
            base.root,
            digest=digest if isinstance(digest, str) else "",
            name=name if isinstance(name, str) else "",
        )
        if reason:
            yield Fault(reason, "the base that the adapter was trained on", file=ADAPTER_CONFIG)
        # A Plumbline artifact is identified by its digest, its folder has any name.
        elif isinstance(name, str) and name and not base.manifest and not _is_named(base, name):
            text = f"{name}; base is {base.root.name}"
            yield Fault(text, "the same name", ADAPTER_CONFIG, (), WARNING)
    elif source.is_model and (wrong := other_sizes(source)):
        yield Fault(some(wrong), "sizes that training does not change", file=CONFIG)


def _is_named(base: Source, name: str) -> bool:
    """Return True if a base has a name, as its folder, in a hub cache or in its config.json."""
    names = {*base.root.resolve().parts[-_HUB:], str(base.config().get("_name_or_path", ""))}
    names |= {name.rpartition("--")[2] for name in names}  # hub caches: models--<owner>--<name>
    known = {name.rstrip("/").rpartition("/")[2].lower() for name in names if name}
    return name.rstrip("/").rpartition("/")[2].lower() in known


def has_values(source: Source) -> bool:
    """Return True for a model and its base whose values are both read."""
    read = source.is_model and source.is_read and source.has_base and source.known_base.is_read
    return read and "WRONG_BASE" not in source.codes


@check(
    "MERGED_EQUALS_BASE", ERROR, needs=(MODEL, has_values),
    why="nothing was merged, or a merge stopped halfway: verl's writes LoRA to its own folder",
    fix="merge the adapter: {again}; with it every tensor is compared: {prove}",
    issues="LLaMA-Factory #9051, LLaMA-Factory #6105, verl #7285",
)  # fmt: skip
def merged_equals_base(source: Source) -> Iterator[Fault]:
    """Every tensor equals the base's; a warning if some layers do, and others do not."""
    base, kinds = source.known_base, dict[str, dict[bool, list[str]]]()
    if "TENSOR_MISSING" in source.codes:
        return
    both = [key for key in source.tensors if same_header(key, source, base)]
    if both and len(both) == len(source.tensors) and first_difference(source, base, both) is None:
        text = f"all {len(both)} tensors equal the base's, bit for bit"
        yield Fault(text, "a model that training changed")
        return
    for key in both if source.adapter is None else ():
        kind = pattern_of(key)
        if len(source.tensors[key].shape) == 2 and kind != key:
            changed = differ((source, key), (base, key))
            kinds.setdefault(kind, {True: [], False: []})[changed].append(key)
    mixed = [each for each in kinds.values() if each[True] and each[False]]
    same = [key for each in mixed for key in each[False]]
    if same:
        total = sum(len(each[True]) + len(each[False]) for each in mixed)
        text = f"{len(same)} of {total} tensors are the base's"
        why = "a merge that stopped halfway looks like this; so does training of some layers"
        yield Fault(text, "all changed, or none", "", same, WARNING, why)


@check(
    "NORM_DIFFERS", ERROR, needs=(MODEL, has_values),
    why="training turns matrices little: scales were lost, or it was transposed or swapped",
    fix="merge again from the base: {again}",
    issues="unsloth-zoo PR #803, unsloth #4919",
)  # fmt: skip
def norms_differ(source: Source) -> Iterator[Fault]:
    """Matrices with less than half or more than twice the norm of the base's, or another one."""
    if source.adapter is not None:
        return  # every element is compared
    ratios, cosines = source.once(_ratios_and_cosines)
    if (median := _median(cosines)) < _COSINE:
        text = f"cosine {median:.2f} to the base's matrices (median)"
        expected = f"at least {_COSINE}: training turns them little"
        yield Fault(text, expected, code="WRONG_BASE")
        return
    norm = [key for key, ratio in ratios.items() if not _LEAST <= ratio <= 1 / _LEAST]
    if norm:
        text = f"{len(norm)} of {len(ratios)} matrices; {norm[0]}: norm {ratios[norm[0]]:.3g}"
        expected = f"{_LEAST} to {1 / _LEAST:g} times the base's"
        yield Fault(text, expected, tensors=norm)
    turned = [key for key, cosine in cosines.items() if cosine < _TURNED]
    if turned:
        cosine = cosines[turned[0]]
        text = f"{len(turned)} of {len(cosines)} matrices; {turned[0]}: cosine {cosine:.2f}"
        yield Fault(f"{text} to the base's", "near 1", tensors=turned)


def value_faults(source: Source) -> Iterator[tuple[str, Fault]]:
    """Yield code and fault of a model whose values cannot have been made from its base."""
    yield from ((fault.code or "NORM_DIFFERS", fault) for fault in norms_differ(source))


def _median(cosines: Mapping[str, float]) -> float:
    return float(np.median(list(cosines.values()))) if cosines else 1.0


def _ratios_and_cosines(source: Source) -> tuple[dict[str, float], dict[str, float]]:
    """Compare the matrices that source and base have; heads may be trained anew."""
    base, ratios, cosines = source.known_base, dict[str, float](), dict[str, float]()
    for key, tensor in source.tensors.items():
        other = base.tensors.get(key)
        if (
            other is None or tensor.shape != other.shape or len(tensor.shape) < 2
            or not (is_float(tensor.dtype) and is_float(other.dtype))
            or not tensor.extents or not other.extents or key.startswith(("score.", "classifier."))
        ):  # fmt: skip
            continue
        products = _products(tensor, other)
        if not np.isfinite(products).all() or not (products[0] and products[2]):
            continue  # reported by `values`; a matrix that begins at zero has no counterpart
        ratios[key] = float(np.sqrt(products[0] / products[2]))
        cosines[key] = float(products[1] / np.sqrt(products[0] * products[2]))
    return ratios, cosines


def _products(ours: Tensor, theirs: Tensor) -> NDArray[np.float64]:
    """Return the sums of a*a, a*b, b*b over blocks of a tensor and its counterpart, shape (3,)."""
    sums = np.zeros(3)
    with Reader(ours.extents) as left, Reader(theirs.extents) as right:
        starts = range(0, ours.numel, _BLOCK)
        for at in starts[:: -(-len(starts) // _BLOCKS)]:
            count = min(_BLOCK, ours.numel - at)
            x, y = (_floats(*pair, at, count) for pair in ((left, ours), (right, theirs)))
            sums += np.dot(x, x), np.dot(x, y), np.dot(y, y)
    return sums


def _floats(reader: Reader, tensor: Tensor, at: int, count: int) -> NDArray[Any]:
    size = tensor.nbytes // tensor.numel
    return widened(reader.read(at * size, count * size), tensor.dtype)


_PROJECTION = re.compile(
    r"\.(?:(?:[qkvo]|out|qkv|gate|up|down|gate_up)_proj|c_attn|c_proj|c_fc|fc[12]|w[123]"
    r"|query_key_value|dense|dense_h_to_4h|dense_4h_to_h)(?:\.weight)?$"
    r"|(?:^|\.)(?:lm_head|embed_out|embed_tokens|wte|embed_in|word_embeddings)\.weight$"
)
"""Matrices without which a language model does not work; adapters in them begin at zero."""


@check(
    "NOT_FINITE", ERROR, needs=(READ,),
    why="one is enough: every logit becomes NaN, vLLM samples token 0 and writes `!!!!`",
    fix="use an earlier checkpoint; the run had diverged",
    issues="OpenRLHF #1120",
)  # fmt: skip
def not_finite(source: Source) -> Iterator[Fault]:
    """Elements that are infinite or NaN."""
    bad = {name: seen.nonfinite for name, seen in source.once(scan).items() if seen.nonfinite}
    if bad:
        text = f"{sum(bad.values())} elements of {len(bad)} tensors"
        yield Fault(text, "finite numbers", tensors=list(bad))


def is_scanned(source: Source) -> bool:
    """Return True if values are read, or a delivery reads them later, which misses empty ones."""
    return source.is_read or (source.alone and source.is_model)


@check(
    "CONSTANT_ROWS", WARNING, needs=(is_scanned,),
    why="memory was saved before it was filled, or the rows were never trained",
    fix="compare it with the base and save again; train embeddings too (modules_to_save)",
    issues="aprender #3971, OpenRLHF #645, OpenRLHF PR #648",
)  # fmt: skip
def constant_rows(source: Source) -> Iterator[Fault]:
    """Rows of zeros or of equal elements; an error where a whole matrix of a model is."""
    padding = whole(of_text(source.config(), "pad_token_id"))  # zero by design
    embedding = embeddings_of(source.tensors, source.config()).input
    same = defaultdict[tuple[str, bool], list[str]](list)
    for name, seen in source.once(scan).items():
        shape, count = source.tensors[name].shape, seen.zero_rows + seen.constant_rows
        if len(shape) not in (2, 3) or _MAY_BE_EQUAL.search(name) or seen.nonfinite:
            continue
        is_needed = _is_needed(source, name)
        if seen.is_zero:
            same["zeros", is_needed].append(name)
        elif count == shape[0] > 1 and is_needed:
            same[f"all {count} rows", True].append(name)
        elif count > 1 or (count and not (name == embedding and padding in seen.rows)):
            same[f"{count} of {shape[0]} rows: {some(seen.rows)}", False].append(name)
    for (text, is_error), names in same.items():
        severity = ERROR if is_error else None
        yield Fault(text, "trained values", tensors=names, severity=severity)


_MAY_BE_EQUAL = re.compile(r"\.lora_|(qzeros|zero_point|g_idx)$")
"""LoRA has checks of its own; symmetric quantisation has one zero point."""


def _is_needed(source: Source, name: str) -> bool:
    """Return True for a matrix without which the model does not work.

    A block whose two outputs are zero passes its input on, as LLaMA-Pro adds them.
    """
    if not source.is_model or _PROJECTION.search(name) is None:
        return False
    attention = name.replace("mlp.down_proj.", "self_attn.o_proj.")
    mlp = attention.replace("self_attn.o_proj.", "mlp.down_proj.")
    seen = source.once(scan)
    block = [seen[each].is_zero for each in (attention, mlp) if each in seen]
    return attention == mlp or len(block) < 2 or not all(block)


@check(
    "LORA_B_ZERO", ERROR, needs=(ADAPTER, READ),
    why="the merged model is the base: training did not reach it, or ZeRO-3 saved too early",
    fix="use a trained checkpoint; compare its step with this one's",
)  # fmt: skip
def lora_b_zero(source: Source) -> Iterator[Fault]:
    """LoRA pairs with a factor of zeros, which change nothing, or magnitudes of zeros."""
    pairs, zero, magnitudes = set[str](), dict[str, str](), list[str]()
    for name, seen in source.once(scan).items():
        factor = FACTOR.search(name)
        if factor is None or not source.tensors[name].numel:
            continue  # an empty tensor is reported elsewhere
        if factor[1] == "magnitude_vector":
            magnitudes += [name] if seen.is_zero else []
            continue
        pairs.add(name[: factor.start()])
        if seen.is_zero:
            zero[name[: factor.start()]] = name
    if zero:
        severity = ERROR if len(zero) == len(pairs) else WARNING
        text = f"{len(zero)} of {len(pairs)} are zero"
        yield Fault(text, "trained values", tensors=list(zero.values()), severity=severity)
    if magnitudes:
        text = f"{len(magnitudes)} magnitude vectors are zero"
        yield Fault(text, "trained values", tensors=magnitudes)
