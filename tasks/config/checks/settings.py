"""Settings that contradict each other, whatever the model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.config.checks import Context
from tasks.config.sections import Optim
from tasks.core.errors import ConfigError, Finding
from tasks.data.kinds import TEXTS, names_texts
from tasks.training.engine.checkpoint import named
from tasks.training.selection import direction
from tasks.weights.write import parse_size

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
    settings, objective = context.settings, context.objective
    train, zero, kind = settings["train"], settings["zero"], settings["peft"]["kind"]
    yield from divides(train)
    yield from _unread(train)
    yield from _data(settings)
    stages = [*STAGES, *(f"{step}.{stage}" for step in settings["steps"] for stage in STAGES)]
    for name in settings["force"]:
        if name not in stages:
            near = difflib.get_close_matches(name, stages, n=2, cutoff=0.5) or ["train"]
            override = " or ".join(f"force=[{stage}]" for stage in near)
            yield Finding("force", f"no stage {name!r}", f"one of {', '.join(STAGES)}", override)
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        if zero[name] == "cpu" and zero["stage"] < least:
            allowed = f"needs ZeRO-{least} or more"
            yield Finding(f"zero.{name}", "cpu", allowed, f"zero=zero{max(least, 2)}")
    if train["optimizer"] != "adamw" and zero["offload_optimizer"] == "cpu":
        value, override = train["optimizer"], "train.optimizer=adamw or zero.offload_optimizer=none"
        yield Finding("train.optimizer", value, "DeepSpeed's CPUAdam has no 8 bits", override)
    if kind == "qlora" and zero["stage"] == 3:
        allowed = "4-bit weights cannot be split; LoRA goes with ZeRO-3"
        override = "zero=zero2 or peft=lora"
        yield Finding("peft and zero", "QLoRA with ZeRO-3", allowed, override)
    base, auto = settings["merge"]["base"], "merge.base=auto"
    if base == "dequantized" and kind != "qlora":
        value = f"{base} with peft.kind={kind}"
        yield Finding("merge.base", value, "only QLoRA quantises the base", auto)
    if base == "original" and kind == "qlora":
        allowed = "the adapter was trained on the dequantised base; expect drift"
        yield Finding("merge.base", "original after QLoRA", allowed, auto, "warning")
    for name, usual in (("keep", "last"), ("early_stop_patience", 0)):
        if train[name] != usual and not train["eval_steps"]:
            allowed = "needs evaluations during training"
            yield Finding(f"train.{name}", str(train[name]), allowed, "train.eval_steps=<steps>")
    try:
        direction(objective, train["best_metric"])
    except ConfigError as error:
        allowed = f"train.objective={objective} does not measure it"
        yield Finding("train.best_metric", train["best_metric"], allowed, error.hint)
    try:
        if train["resume"] not in ("auto", "never"):
            named(train["resume"], context.runs / "checkpoints")
    except ConfigError as error:
        yield Finding("train.resume", error.message, error.hint, "train.resume=auto")
    try:
        parse_size(settings["convert"]["max_shard_size"])
    except ConfigError as error:
        yield Finding("convert.max_shard_size", error.message, "a size", error.hint)


def divides(train: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse a global batch that is not a multiple of what all ranks process at once."""
    size, micro = train["global_batch_size"], train["micro_batch_size"]
    ranks, sharing = train["nproc"] * train["nodes"], train["sequence_parallel"]
    together = micro * ranks // sharing
    if ranks % sharing or size % together == 0:
        return  # `model` reports ranks that do not divide
    shared = f" / {sharing}" if sharing > 1 else ""
    lower = size // together * together
    near = [number for number in (lower, lower + together) if number]
    yield Finding(
        "train.global_batch_size",
        str(size),
        f"a multiple of micro_batch_size x ranks = {micro} x {ranks}{shared} = {together}",
        " or ".join(f"train.global_batch_size={number}" for number in near),
    )


def _unread(train: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse options that the objective or the schedule does not read."""
    objective, scheduler = train["objective"], train["scheduler"]
    for name, value in train["loss"].items():
        if value is not None and objective not in LOSS[name]:
            what = f"no effect with train.objective={objective}"
            override = f"train.loss.{name}=null or train={LOSS[name][0]}"
            yield Finding(f"train.loss.{name}", what, f"only {', '.join(LOSS[name])}", override)
    for name, readers in _SCHEDULES.items():
        default = getattr(Optim, name)
        if train[name] != default and scheduler not in readers:
            what = f"no effect with train.scheduler={scheduler}"
            override = f"train.{name}={default:g} or train.scheduler={readers[0]}"
            yield Finding(f"train.{name}", what, f"only {', '.join(readers)}", override)


def _data(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that data are read as meant: raw texts by sft on every token, and only they split."""
    train, data, key = settings["train"], settings["data"], "data.text_key"
    for name in ("path", "eval_path", "name", "sources"):
        if data["kind"] == "toy" and data[name]:
            allowed = "the embedded tasks would be read instead"
            yield Finding(f"data.{name}", "set with data.kind=toy", allowed, "data=auto")
    if not names_texts(data):
        if train["on_overlong"] == "split":
            allowed = "a piece of a conversation has lost its prompt; split is for raw texts"
            yield Finding("train.on_overlong", "split", allowed, "train.on_overlong=truncate")
    elif train["objective"] not in TEXTS.objectives:
        value = f"raw texts with train.objective={train['objective']}"
        yield Finding(key, value, "raw texts are for sft", f"{key}=null or train=sft")
    elif train["mask"] != "every_token":
        yield Finding("train.mask", train["mask"], "a raw text has no answers", "train=pretrain")
    elif settings["gate"]["min_eval_gain"] is not None:
        allowed = "a raw text is not answered right or wrong"
        yield Finding("gate.min_eval_gain", f"with {key}", allowed, "gate.min_eval_gain=null")
