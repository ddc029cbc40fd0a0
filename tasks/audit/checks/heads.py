"""Check reward and value heads: a head exists where one is needed, and loaders find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tasks.audit.catalogue.heads import Heads
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG, MODELS
from tasks.audit.source import Source
from tasks.audit.weights import open_weights
from tasks.weights.files.source import Source as Tensors
from tasks.weights.heads.absence import absence, layered_head
from tasks.weights.heads.detect import MANY_LABELS, Found, Head, detect
from tasks.weights.heads.folder import ADAPTER, HEAD, MODEL, SIDE_FILES, HeadFolder, architectures

_LABELS = 2
"""Number of labels that transformers assumes if config.json does not set it."""


def check(source: Source) -> Iterator[Finding]:
    """Check the head of a model or adapter that has one or needs one."""
    if not (source.is_model or source.is_adapter) or not source.tensors:
        return
    folder = head_folder(source)
    detected = detect(folder)
    yield from _absent(source, detected)
    if detected.head is not None and detected.head.role == "value":
        yield Heads.HEAD_OF_CRITIC.at(
            CONFIG, found=source.recognised.what, expected="a policy, or a reward model"
        )
        return
    if detected.head is not None:
        yield from _place(source, detected.head)
        yield from _labels(source, detected.head)
    yield from _unusable(source, detected)
    for note in detected.notes:
        yield Heads.HEAD_PREFIX.at(CONFIG, found=note, expected="the name of the saved head")
    yield from _normalisation(source, detected)


def head_folder(source: Source) -> HeadFolder:
    """Return the source as `tasks.weights.heads` reads it."""
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


def _absent(source: Source, detected: Found) -> Iterator[Finding]:
    if detected.head is not None or not source.weights.is_whole or layered_head(detected.folder):
        return
    reason = next(iter(absence(detected.folder, detected.lora_on)), "")
    if detected.lora_on and not _base_has(source, detected.lora_on):
        name = f"base_model.model.{detected.lora_on}.lora_A.weight"
        yield Heads.HEAD_BASE_LOST.at(
            source.weights.single, name, found=reason, expected=f"{detected.lora_on}.weight in full"
        )
    elif (
        reason
        and not detected.lora_on
        and not detected.findings[1:]
        and not _base_has(source, "score")
    ):
        yield Heads.HEAD_MISSING.at(
            "", found=reason, expected="score.weight or v_head.summary.weight, (1, hidden)"
        )


def _base_has(source: Source, module: str) -> bool:
    """Return True if the base has the head that an adapter lacks: then nothing is lost."""
    return source.base is not None and f"{module}.weight" in source.base.tensors


def _place(source: Source, head: Head) -> Iterator[Finding]:
    where, _, key = head.weight.partition(":")
    if head.dialect == "trl" and where == MODEL:
        yield Heads.HEAD_IN_MODEL.at(
            source.tensors[key].file, key, found="TRL's value head in the model",
            expected="the language model alone",
        )  # fmt: skip
    elif where == HEAD:
        name = next(file for file in (*SIDE_FILES, MODELS[1]) if file in source.folder.files)
        yield Heads.HEAD_SIDE_FILE.at(
            name, key, found="a head in a separate file", expected="a loader that reads it"
        )


def _labels(source: Source, head: Head) -> Iterator[Finding]:
    """Compare the rows of a linear head with config.json; value heads always have one row."""
    if head.dialect not in ("openrlhf", "transformers") or len(head.shape) != 2:
        return
    config = source.config()
    table, count = config.get("id2label"), config.get("num_labels")
    labels = count if type(count) is int else len(table) if isinstance(table, dict) else _LABELS
    rows = head.shape[0]
    if rows and rows != labels:
        default = "" if "num_labels" in config or "id2label" in config else " by default"
        yield Heads.HEAD_LABELS.at(
            CONFIG, head.weight.partition(":")[2], found=f"{rows} rows, {labels} labels{default}",
            expected=f"num_labels={rows}",
        )  # fmt: skip
    elif rows == _LABELS:
        yield Heads.HEAD_TWO_LABELS.at(
            CONFIG, head.weight.partition(":")[2], found="2 labels", expected="1 for a reward"
        )


def _unusable(source: Source, detected: Found) -> Iterator[Finding]:
    """Report what detection says about existing heads; `_labels` covers the number of rows."""
    missing = set(absence(detected.folder, detected.lora_on))
    numbers = ("mean", "std", f"{CONFIG}: mean", f"{CONFIG}: std")
    for problem in detected.findings:
        if problem in missing or MANY_LABELS in problem:
            continue
        entry = Heads.HEAD_MEAN_STD if problem.startswith(numbers) else Heads.HEAD_UNUSABLE
        yield entry.at("", found=problem, expected="one head, (1, hidden)")


def _normalisation(source: Source, detected: Found) -> Iterator[Finding]:
    named = "RewardModel" in architectures(source.config())
    if not named and "value_head_prefix" not in source.config():
        return
    scale = detected.normalisation
    if scale.is_there and not scale.buffers:
        yield Heads.HEAD_NORMALISATION.at(
            CONFIG, found=f"mean {scale.mean}, std {scale.std}; no such tensors",
            expected="tensors mean and std, or a loader that reads config.json",
        )  # fmt: skip
    elif named and not scale.is_there:
        yield Heads.HEAD_NOT_NORMALISED.at(CONFIG, found="no mean, no std", expected="both")
