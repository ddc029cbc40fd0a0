"""Settings that contradict each other, whatever the model."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config import Rlhf
from tasks.config.checks.context import Context
from tasks.config.learning import Optim
from tasks.config.section import out_of_range
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.data.kinds import TEXTS, names_texts
from tasks.training.resume import newest
from tasks.training.selection import direction
from tasks.weights.execute.writer import parse_size

_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "min_lr_ratio": ("cosine_with_min_lr", "polynomial", "warmup_stable_decay"),
    "decay_ratio": ("warmup_stable_decay",),
    "power": ("polynomial",),
    "num_cycles": ("cosine_with_restarts",),
}
"""Schedules that read an option."""
LOSS: Mapping[str, tuple[str, ...]] = {
    "kind": ("dpo",),
    "beta": ("dpo", "kto", "orpo", "simpo"),
    "gamma": ("simpo",),
    "margin": ("reward",),
    "center": ("reward",),
    "label_smoothing": ("dpo",),
    "nll": ("dpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Objectives that have each option of `train.loss`."""
STAGES = (
    "prepare_data", "prepare_base", "rollout_base", "train", "gather", "merge", "convert",
    "smoke_eval", "quantize", "smoke_quantized", "lm_eval",
)  # fmt: skip
"""Names of the chain's stages, as `flows/chain/chain.py` runs them."""


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of the settings alone."""
    settings = context.settings
    train, peft, zero = settings["train"], settings["peft"], settings["zero"]
    yield from out_of_range(Rlhf, settings)
    yield from divides(train)
    yield from loss(train)
    yield from evaluation(train)
    yield from schedule(train)
    yield from raw_texts(settings)
    yield from resume(train["resume"])
    yield from forced(settings["force"], settings["steps"])
    yield from offload(train["optimizer"], zero)
    yield from merge_base(settings["merge"]["base"], peft["kind"])
    try:
        parse_size(settings["convert"]["max_shard_size"])
    except ConfigError as error:
        yield Finding("convert.max_shard_size", error.message, "a size", error.hint)


def divides(train: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse a global batch that is not a positive multiple of what all ranks process at once."""
    size, micro = train["global_batch_size"], train["micro_batch_size"]
    ranks, sharing = train["nproc"] * train["nodes"], train["sequence_parallel"]
    if min(size, micro, ranks, sharing) < 1 or ranks % sharing:
        return  # other checks report that
    together = micro * ranks // sharing
    if size % together:
        shared = f" / {sharing}" if sharing > 1 else ""
        lower = size // together * together
        near = [number for number in (lower, lower + together) if number]
        yield Finding(
            "train.global_batch_size",
            str(size),
            f"a multiple of micro_batch_size x ranks = {micro} x {ranks}{shared} = {together}",
            " or ".join(f"train.global_batch_size={number}" for number in near),
        )


def loss(train: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse options of `train.loss` that the objective does not have."""
    objective = train["objective"]
    for name, value in train["loss"].items():
        if value is not None and objective not in LOSS[name]:
            yield Finding(
                f"train.loss.{name}",
                f"no effect with train.objective={objective}",
                f"only {', '.join(LOSS[name])} have it",
                f"train.loss.{name}=null or train={LOSS[name][0]}",
            )


def evaluation(train: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the metric is measured, and that evaluations exist if a setting needs them."""
    try:
        direction(train["objective"], train["best_metric"])
    except ConfigError as error:
        value = f"{train['best_metric']} with train.objective={train['objective']}"
        yield Finding("train.best_metric", value, "it does not measure that", error.hint)
    if not train["eval_steps"]:
        wanted = {"keep": train["keep"] == "best", "early_stop_patience": True}
        for name, needed in wanted.items():
            if train[name] and needed:
                value = f"{train[name]} with train.eval_steps=0"
                allowed = "needs evaluations during training"
                yield Finding(f"train.{name}", value, allowed, "train.eval_steps=<steps>")


def schedule(train: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse options that the chosen schedule does not read."""
    for name, readers in _SCHEDULES.items():
        default = getattr(Optim, name)
        if train[name] != default and train["scheduler"] not in readers:
            value = f"{train[name]:g} with train.scheduler={train['scheduler']}"
            override = f"train.{name}={default:g} or train.scheduler={readers[0]}"
            yield Finding(f"train.{name}", value, "the schedule does not read it", override)


def raw_texts(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that raw texts are trained with sft on every token, and that only they are split."""
    train, key = settings["train"], "data.text_key"
    objective, mask = train["objective"], train["mask"]
    if not names_texts(settings["data"]):
        if mask == "every_token" and objective != "sft":
            value = f"{mask} with train.objective={objective}"
            yield Finding("train.mask", value, "it is for sft", "train.mask=every_answer")
        if train["on_overlong"] == "split":
            allowed = "a piece of a conversation has lost its prompt; split is for raw texts"
            override = f"train.on_overlong=truncate or refuse, or {key}=<column>"
            yield Finding("train.on_overlong", f"split without {key}", allowed, override)
        return
    if objective not in TEXTS.objectives:
        value = f"raw texts with train.objective={objective}"
        override = f"{key}=null or train.objective=sft"
        yield Finding(key, value, "raw texts are for sft", override)
    elif mask != "every_token":
        value, allowed = f"{mask} with {key}", "a raw text has no answers"
        yield Finding("train.mask", value, allowed, "train=pretrain")
    if settings["gate"]["min_eval_gain"] is not None:
        value, allowed = f"with {key}", "a raw text is not answered right or wrong"
        yield Finding("gate.min_eval_gain", value, allowed, "gate.min_eval_gain=null")


def resume(how: str) -> Iterator[Finding]:
    """Check that `train.resume` is a word or a folder with a complete checkpoint."""
    path = Path(how).expanduser()
    if how not in ("auto", "never") and newest(path) is None:
        value = f"no complete checkpoint in {path}"
        yield Finding("train.resume", value, "auto, never, or a checkpoint", "train.resume=auto")


def forced(names: Sequence[str], steps: Collection[str] = ()) -> Iterator[Finding]:
    """Refuse names in `force` that are not stages, or `step.stage` of a step of the chain."""
    known = [*STAGES, *(f"{step}.{stage}" for step in steps for stage in STAGES)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            override = " or ".join(f"force=[{stage}]" for stage in near) or "force=[train]"
            allowed = f"the stages are {', '.join(STAGES)}"
            yield Finding("force", f"no stage {name!r}", allowed, override)


def offload(optimizer: str, zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse to offload what the ZeRO stage does not partition, and 8-bit moments on the host."""
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        if zero[name] == "cpu" and zero["stage"] < least:
            value, allowed = f"cpu with ZeRO-{zero['stage']}", f"needs ZeRO-{least} or more"
            yield Finding(f"zero.{name}", value, allowed, f"zero=zero{max(least, 2)}")
    if optimizer != "adamw" and zero["offload_optimizer"] == "cpu":
        value = f"{optimizer} with zero.offload_optimizer=cpu"
        allowed = "DeepSpeed's CPUAdam has no 8 bits"
        override = "train.optimizer=adamw or zero.offload_optimizer=none"
        yield Finding("train.optimizer", value, allowed, override)


def merge_base(base: str, kind: str) -> Iterator[Finding]:
    """Check that an adapter is merged into the base that it was trained on."""
    if base == "dequantized" and kind != "qlora":
        value = f"dequantized with peft.kind={kind}"
        yield Finding("merge.base", value, "only QLoRA quantises the base", "merge.base=auto")
    if base == "original" and kind == "qlora":
        allowed = "the adapter was trained on the dequantised base; expect drift"
        yield Finding("merge.base", "original after QLoRA", allowed, "merge.base=auto", "warning")
