"""Heads for rewards and values: a head exists where one is needed, and loaders find it."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check, either
from tasks.audit.checks.files import vllm_takes
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, MODELS, Source, open_weights, setting
from tasks.weights.files.tensors import Tensors
from tasks.weights.heads import (
    ADAPTER,
    HEAD,
    MANY_LABELS,
    MODEL,
    SIDE_FILES,
    Detected,
    HeadFolder,
    architectures,
    detect,
)

_LABELS = 2
"""Number of labels that transformers assumes if config.json does not set it."""


def may_have(source: Source) -> bool:
    """Return True for a model or an adapter with known tensors."""
    return either(source) and bool(source.tensors)


def _detected(source: Source) -> Detected:
    """Detect the head of the source, opened as `tasks.weights.heads` reads it."""
    is_adapter = source.is_adapter
    sources: dict[str, Tensors] = {ADAPTER if is_adapter else MODEL: source.tensors}
    beside = tuple(name for name in _side_files(source) if name in source.folder.files)
    if beside:
        sources[HEAD] = open_weights(source.folder, beside[0]).tensors
    adapter_config = source.config(ADAPTER_CONFIG) if is_adapter else None
    folder = HeadFolder(source.root, source.config(), adapter_config, sources, beside)
    return detect(folder)


def _side_files(source: Source) -> tuple[str, ...]:
    """Return names of files with a head; TRL saves that of a PEFT model as a model's weights."""
    return (*SIDE_FILES, MODELS[1]) if source.is_adapter else SIDE_FILES


def _is_critic(source: Source) -> bool:
    head = source.once(_detected).head if may_have(source) else None
    return head is not None and head.role == "value"


def has_no_critic(source: Source) -> bool:
    """Return True for a head that is not a critic's, which `HEAD_UNUSABLE` reports."""
    return may_have(source) and not _is_critic(source)


@check(
    "HEAD_MISSING", ERROR, needs=(may_have,),
    why="transformers initialises a random head and warns: the scores are noise",
    fix="it cannot be recovered, except from DeepSpeed's shards: train again and save it in full",
    issues="LLaMA-Factory #7706, LLaMA-Factory #1411, LLaMA-Factory #1024",
)  # fmt: skip
def head_missing(source: Source) -> Iterator[Fault]:
    """A reward or value model without its head, or with LoRA on a head that was never saved."""
    detected = source.once(_detected)
    reason, lora_on = detected.absence, detected.lora_on
    # Nothing is lost if the base has the head that an adapter lacks.
    in_base = source.base is not None and f"{lora_on or 'score'}.weight" in source.base.tensors
    if detected.head is not None or not source.weights.is_whole or detected.layered or in_base:
        return
    if lora_on:
        name = f"base_model.model.{lora_on}.lora_A.weight"
        yield Fault(reason, f"{lora_on}.weight in full", source.weights.single, [name])
    elif reason and not detected.findings[1:]:
        yield Fault(reason, "score.weight or v_head.summary.weight, (1, hidden)")


@check(
    "HEAD_PLACE", ERROR, needs=(has_no_critic,),
    why="`There is no module or parameter named 'v_head'` in vLLM; transformers ignores it",
    fix="deliver the model without it; it stays in the folder: {deliver}",
    issues="LLaMA-Factory #7511, LLaMA-Factory #4379, LLaMA-Factory #8635",
)  # fmt: skip
def head_place(source: Source) -> Iterator[Fault]:
    """A value head among the language model's tensors, or in a file beside the weights."""
    head = source.once(_detected).head
    where, _, key = head.weight.partition(":") if head is not None else ("", "", "")
    if head is not None and head.dialect == "trl" and where == MODEL:
        yield Fault("TRL's value head in the model", "the language model alone", tensors=[key])
    names = _side_files(source) if where == HEAD else SIDE_FILES
    for name in [name for name in names if name in source.folder.files][:1]:
        taken = source.is_model and vllm_takes(name, source.weights)
        text, expected = "a value head beside the weights", "the language model alone"
        yield Fault(text, expected, file=name, severity=None if taken else WARNING)


@check(
    "HEAD_UNUSABLE", ERROR, needs=(may_have,),
    why="loaders stop at its shape, read the wrong one, or start with a new random head",
    fix="save the head again, once and in full; set value_head_prefix to its name",
    issues="OpenRLHF #682, OpenRLHF PR #1342, OpenRLHF #1039, OpenRLHF #872, OpenRLHF #542",
)  # fmt: skip
def head_unusable(source: Source) -> Iterator[Fault]:
    """A critic, or a head that is empty, stored twice, of a wrong size, or not in config.json."""
    detected, config = source.once(_detected), source.config()
    if _is_critic(source):
        why = "no server has a class for it; a reward model would score a text by its last value"
        fix = "serve the policy that was trained with it"
        yield Fault(source.what, "a policy, or a reward model", why=why, fix=fix)
        return
    for problem in detected.findings:
        if problem != detected.absence and MANY_LABELS not in problem:
            yield Fault(problem, "one head, (1, hidden)")
    for note in detected.notes:
        yield Fault(note, "the name of the saved head", file=CONFIG)
    head = detected.head
    if head is None or head.dialect not in ("openrlhf", "transformers") or len(head.shape) != 2:
        return  # value heads always have one row
    table, count, rows = config.get("id2label"), config.get("num_labels"), head.shape[0]
    labels = count if type(count) is int else len(table) if isinstance(table, dict) else _LABELS
    if rows and rows != labels:
        text, key = f"{rows} rows, {labels} labels", head.weight.partition(":")[2]
        fix = setting(CONFIG, num_labels=rows)
        yield Fault(text, f"num_labels={rows}", CONFIG, [key], fix=fix)


@check(
    "HEAD_NORMALISATION", WARNING, needs=(has_no_critic,),
    why="transformers leaves OpenRLHF's buffers uninitialised: rewards off by magnitudes",
    fix="normalise by config.json; vLLM: PoolerConfig(logit_mean=mean, logit_sigma=std)",
    issues="OpenRLHF PR #1343, OpenRLHF #693, OpenRLHF #224",
)  # fmt: skip
def head_normalisation(source: Source) -> Iterator[Fault]:
    """An OpenRLHF reward model with mean and std of rewards only in config.json, or without."""
    named = "RewardModel" in architectures(source.config())
    if not (named or "value_head_prefix" in source.config()):
        return
    scale = source.once(_detected).normalisation
    if scale.is_there and not scale.buffers:
        text = f"mean {scale.mean}, std {scale.std}; no such tensors"
        yield Fault(text, "tensors mean and std, or a loader that reads config.json", file=CONFIG)
    elif named and not scale.is_there:
        yield Fault("no mean, no std", "both", file=CONFIG, severity=INFO)
