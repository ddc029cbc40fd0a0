"""Heads for rewards and values: a head exists where one is needed, and loaders find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tasks.audit.check import ERROR, INFO, WARNING, Fault, Severity, check, either
from tasks.audit.checks.files import vllm_takes
from tasks.audit.folder import open_weights
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, MODELS, Source
from tasks.weights.files.source import Source as Tensors
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


def has_tensors(source: Source) -> bool:
    """Return True for a model or an adapter whose tensors are known."""
    return either(source) and bool(source.tensors)


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


def _detected(source: Source) -> Detected:
    return detect(head_folder(source))


def _is_critic(source: Source) -> bool:
    head = source.once(_detected).head
    return head is not None and head.role == "value"


@check(
    "HEAD_MISSING", ERROR, needs=(has_tensors,),
    why="transformers initialises a random head and warns; LLaMA-Factory says `Reward model is not "
    "correctly loaded`; the scores are noise. With LoRA on a head that was never saved, `size "
    "mismatch for score.lora_B`",
    fix="a head that was never saved cannot be recovered: train again and save it in full "
    "(modules_to_save); if DeepSpeed's shards are still there, they contain it",
    issues="LLaMA-Factory #7706, LLaMA-Factory #1411, LLaMA-Factory #1024",
)  # fmt: skip
def head_missing(source: Source) -> Iterator[Fault]:
    """A reward or value model without its head, or with LoRA on a head that was never saved."""
    detected = source.once(_detected)
    if detected.head is not None or not source.weights.is_whole or detected.layered:
        return
    reason, lora_on = detected.absence, detected.lora_on
    # Nothing is lost if the base has the head that an adapter lacks.
    in_base = source.base is not None and f"{lora_on or 'score'}.weight" in source.base.tensors
    if in_base:
        return
    if lora_on:
        name = f"base_model.model.{lora_on}.lora_A.weight"
        yield Fault(reason, f"{lora_on}.weight in full", source.weights.single, [name])
    elif reason and not detected.findings[1:]:
        yield Fault(reason, "score.weight or v_head.summary.weight, (1, hidden)")


@check(
    "HEAD_OF_CRITIC", ERROR, needs=(has_tensors, _is_critic),
    why="no server has a class for it; loaded as a reward model it scores a text by the value of "
    "its last token, which looks like a reward",
    fix="serve the policy that was trained with it; a critic is only useful to continue training",
)  # fmt: skip
def head_of_critic(source: Source) -> Iterator[Fault]:
    """A critic: a model that gives every token a value."""
    yield Fault(source.recognised.what, "a policy, or a reward model", file=CONFIG)


@check(
    "HEAD_PLACE", ERROR, needs=(has_tensors,),
    why="`There is no module or parameter named 'v_head'` in vLLM; transformers ignores it; tools "
    "that look for it in another place say `no v_head weight is found` and train on with a random "
    "head",
    fix="split it off: {deliver}",
    issues="LLaMA-Factory #7511, LLaMA-Factory #4379, LLaMA-Factory #8635",
)  # fmt: skip
def head_place(source: Source) -> Iterator[Fault]:
    """A value head among the language model's tensors, or in a file beside the weights."""
    head = source.once(_detected).head
    if _is_critic(source):
        return
    where, _, key = head.weight.partition(":") if head is not None else ("", "", "")
    if head is not None and head.dialect == "trl" and where == MODEL:
        text = "TRL's value head in the model"
        yield Fault(text, "the language model alone", tensors=[key])
    names = (*SIDE_FILES, MODELS[1]) if where == HEAD else SIDE_FILES
    for name in [name for name in names if name in source.folder.files][:1]:
        taken = source.is_model and vllm_takes(name, source.weights)
        yield Fault(
            "a value head beside the weights", "the head in a folder of its own", file=name,
            severity=None if taken else WARNING,
        )  # fmt: skip


@check(
    "HEAD_LABELS", ERROR, needs=(has_tensors,),
    why="transformers assumes two labels if num_labels is not set: `size mismatch for "
    "score.weight: [1, hidden] vs [2, hidden]`, or a new random head",
    fix="convert it: {deliver}",
    issues="OpenRLHF #1039, OpenRLHF #872, OpenRLHF #542",
)  # fmt: skip
def head_labels(source: Source) -> Iterator[Fault]:
    """The head's rows and the number of labels in config.json disagree, or there are two labels."""
    head, config = source.once(_detected).head, source.config()
    if head is None or head.dialect not in ("openrlhf", "transformers") or len(head.shape) != 2:
        return  # value heads always have one row
    if _is_critic(source):
        return
    table, count = config.get("id2label"), config.get("num_labels")
    labels = count if type(count) is int else len(table) if isinstance(table, dict) else _LABELS
    rows, key = head.shape[0], head.weight.partition(":")[2]
    if rows and rows != labels:
        default = "" if "num_labels" in config or "id2label" in config else " by default"
        yield Fault(
            f"{rows} rows, {labels} labels{default}", f"num_labels={rows}", CONFIG, [key],
            fix=f'in config.json: "num_labels": {rows}',
        )  # fmt: skip
    elif rows == _LABELS:
        yield Fault(
            "2 labels", "1 for a reward", CONFIG, [key], severity=INFO,
            why="correct for a classifier of two classes; in a reward model it is the random head "
            "that a loader creates without num_labels=1",
            fix="if it should be a reward model: the head was lost, train again",
        )  # fmt: skip


@check(
    "HEAD_UNUSABLE", ERROR, needs=(has_tensors,),
    why="loaders stop at its shape, or read the wrong one; OpenRLHF loads a new random head under "
    "the name of value_head_prefix; rewards are normalised with only one of mean and std",
    fix="save the head again, once and in full; set value_head_prefix to its name in the weights; "
    "evaluate the model again, which writes mean and std",
    issues="OpenRLHF #682, OpenRLHF PR #1342",
)  # fmt: skip
def head_unusable(source: Source) -> Iterator[Fault]:
    """A head that is empty, stored twice, of a wrong size, or not the one of config.json."""
    if _is_critic(source):
        return
    detected = source.once(_detected)
    for problem in detected.findings:
        if problem != detected.absence and MANY_LABELS not in problem:
            yield Fault(problem, "one head, (1, hidden)")
    for note in detected.notes:
        yield Fault(note, "the name of the saved head", file=CONFIG)


@check(
    "HEAD_NORMALISATION", WARNING, needs=(has_tensors,),
    why="OpenRLHF keeps them in buffers that are not saved and that transformers 5 leaves "
    "uninitialised when it loads: normalised rewards off by orders of magnitude. Without them "
    "normalize_reward silently uses 0 and 1",
    fix="normalise with the numbers in config.json: (score - mean) / std; vLLM: "
    "PoolerConfig(logit_mean=mean, logit_sigma=std). OpenRLHF writes them when it evaluates",
    issues="OpenRLHF PR #1343, OpenRLHF #693, OpenRLHF #224",
)  # fmt: skip
def head_normalisation(source: Source) -> Iterator[Fault]:
    """An OpenRLHF reward model with mean and std of rewards only in config.json, or without."""
    named = "RewardModel" in architectures(source.config())
    if _is_critic(source) or not (named or "value_head_prefix" in source.config()):
        return
    scale = source.once(_detected).normalisation
    if scale.is_there and not scale.buffers:
        text = f"mean {scale.mean}, std {scale.std}; no such tensors"
        yield Fault(text, "tensors mean and std, or a loader that reads config.json", file=CONFIG)
    elif named and not scale.is_there:
        yield Fault("no mean, no std", "both", file=CONFIG, severity=Severity.INFO)
