"""Heads for rewards and values: is there one where there has to be, and can its loaders find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tasks.audit.catalogue import heads as say
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG, MODELS
from tasks.audit.source import Source
from tasks.audit.weights import open_weights
from tasks.weights.files.source import Source as Tensors
from tasks.weights.heads.absence import absence, layered_head
from tasks.weights.heads.detect import Found, Head, detect
from tasks.weights.heads.folder import ADAPTER, HEAD, MODEL, SIDE_FILES, HeadFolder, architectures

_LABELS = 2
"""What transformers takes where config.json does not tell."""


def check(source: Source) -> Iterator[Finding]:
    """The head of a model or an adapter, if it has one or should have."""
    if not (source.is_model or source.is_adapter) or not source.tensors:
        return
    folder = opened(source)
    found = detect(folder)
    yield from _absent(source, found)
    if found.head is not None and found.head.role == "value":
        yield say.HEAD_OF_CRITIC.at(
            CONFIG, found=source.recognised.what, expected="a policy, or a reward model"
        )
        return
    if found.head is not None:
        yield from _place(source, found.head)
        yield from _labels(source, found.head)
    yield from _unusable(source, found)
    for note in found.notes:
        yield say.HEAD_PREFIX.at(CONFIG, found=note, expected="the name of the head that is saved")
    yield from _normalisation(source, found)


def opened(source: Source) -> HeadFolder:
    """The source as the weights room's detection of heads takes it."""
    is_adapter = source.is_adapter
    sources: dict[str, Tensors] = {ADAPTER if is_adapter else MODEL: source}
    # TRL saves the head of a PEFT model as if it were the whole model's weights.
    names = (*SIDE_FILES, MODELS[1]) if is_adapter else SIDE_FILES
    beside = tuple(name for name in names if name in source.folder.files)
    if beside:
        side = replace(source.recognised, weights=open_weights(source.folder, beside[0]))
        sources[HEAD] = replace(source, recognised=side)
    adapter_config = source.config(ADAPTER_CONFIG) if is_adapter else None
    return HeadFolder(source.folder.root, source.config(), adapter_config, sources, beside)


def _absent(source: Source, found: Found) -> Iterator[Finding]:
    if found.head is not None or not source.weights.is_whole or layered_head(found.folder):
        return
    reason = next(iter(absence(found.folder, found.lora_on)), "")
    if found.lora_on and not _base_has(source, found.lora_on):
        name = f"base_model.model.{found.lora_on}.lora_A.weight"
        yield say.HEAD_BASE_LOST.at(
            source.weights.single, name, found=reason, expected=f"{found.lora_on}.weight, whole"
        )
    elif reason and not found.lora_on and not found.findings[1:] and not _base_has(source, "score"):
        yield say.HEAD_MISSING.at(
            "", found=reason, expected="score.weight or v_head.summary.weight, (1, hidden)"
        )


def _base_has(source: Source, module: str) -> bool:
    """Return True if the base has the head that an adapter lacks: then nothing is lost."""
    return source.base is not None and f"{module}.weight" in source.base.tensors


def _place(source: Source, head: Head) -> Iterator[Finding]:
    where, _, key = head.weight.partition(":")
    if head.dialect == "trl" and where == MODEL:
        yield say.HEAD_IN_MODEL.at(
            source.tensors[key].file, key, found="TRL's value head in the model",
            expected="the language model alone",
        )  # fmt: skip
    elif where == HEAD:
        name = next(one for one in (*SIDE_FILES, MODELS[1]) if one in source.folder.files)
        yield say.HEAD_SIDE_FILE.at(
            name, key, found="a head in a file of its own", expected="known to who loads it"
        )


def _labels(source: Source, head: Head) -> Iterator[Finding]:
    """Rows of a linear head against config.json; value heads are always one number."""
    if head.dialect not in ("openrlhf", "transformers") or len(head.shape) != 2:
        return
    config = source.config()
    table, said = config.get("id2label"), config.get("num_labels")
    labels = said if type(said) is int else len(table) if isinstance(table, dict) else _LABELS
    rows = head.shape[0]
    if rows and rows != labels:
        told = "" if "num_labels" in config or "id2label" in config else ", which is not told there"
        yield say.HEAD_LABELS.at(
            CONFIG, head.weight.partition(":")[2], found=f"{rows} rows, {labels} labels{told}",
            expected=f"num_labels={rows}",
        )  # fmt: skip
    elif rows == _LABELS:
        yield say.HEAD_TWO_LABELS.at(
            CONFIG, head.weight.partition(":")[2], found="2 labels", expected="1 for a reward"
        )


def _unusable(source: Source, found: Found) -> Iterator[Finding]:
    """What detection says of heads that are there; the number of rows is said better above."""
    missing = set(absence(found.folder, found.lora_on))
    numbers = ("mean", "std", f"{CONFIG}: mean", f"{CONFIG}: std")
    for one in found.findings:
        if one in missing or " labels, a reward is one number" in one:
            continue
        entry = say.HEAD_MEAN_STD if one.startswith(numbers) else say.HEAD_UNUSABLE
        yield entry.at("", found=one, expected="one head, (1, hidden)")


def _normalisation(source: Source, found: Found) -> Iterator[Finding]:
    named = "RewardModel" in architectures(source.config())
    if not named and "value_head_prefix" not in source.config():
        return
    scale = found.normalisation
    if scale.is_there and not scale.buffers:
        yield say.HEAD_NORMALISATION.at(
            CONFIG, found=f"mean {scale.mean}, std {scale.std}; no such tensors",
            expected="tensors mean and std, or a loader that reads config.json",
        )  # fmt: skip
    elif named and not scale.is_there:
        yield say.HEAD_NOT_NORMALISED.at(CONFIG, found="no mean, no std", expected="both")
