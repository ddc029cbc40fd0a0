"""Report settings on the command line that the chosen kinds do not read.

A value from an experiment's file is not reported: the file serves several kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tasks.config.defaults import ONLINE
from tasks.core.finding import Finding
from tasks.data.kinds import TEXTS, kind_for, names_texts
from tasks.data.readers import FILE_KINDS, HUB

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


class Unread(NamedTuple):
    """Keys without effect: patterns, the deciding setting, their readers, the override."""

    keys: str
    because: str
    readers: str
    override: str


def unread(
    settings: Mapping[str, Any],
    typed: Collection[str],
    *,
    rewarded: bool = False,
    based: bool = False,
) -> list[Finding]:
    """Return a finding for every typed key that a run of these settings does not read.

    Args:
        settings: the resolved configuration.
        typed: dotted keys, and names of groups.
        rewarded: True if an earlier step of the chain trains the reward model.
        based: True if an earlier step of the chain trains the model that this one begins with.
    """
    rules = [*_chained(rewarded, based), *_rules(settings, rewarded)]
    findings = []
    for key in dict.fromkeys(typed):
        rule = next((r for r in rules if any(fnmatchcase(key, k) for k in r.keys.split())), None)
        if rule is not None:
            effect, override = f"no effect with {rule.because}", f"{rule.override}, or leave it out"
            findings.append(Finding(key, effect, rule.readers, override))
    return findings


def loss(train: Mapping[str, Any]) -> list[Finding]:
    """Refuse options of `train.loss` that the objective does not have, wherever they were set."""
    objective = train["objective"]
    return [
        Finding(
            f"train.loss.{name}",
            f"no effect with train.objective={objective}",
            f"only {', '.join(LOSS[name])} have it",
            f"train.loss.{name}=null or train={LOSS[name][0]}",
        )
        for name, value in train["loss"].items()
        if value is not None and objective not in LOSS[name]
    ]


def _chained(rewarded: bool, based: bool) -> Iterator[Unread]:
    """Yield the keys that an earlier step of the chain decides."""
    if based:
        keys = "model.path model.revision model.steps model.seed model.vocab_multiple"
        readers, override = "it begins with what that step serves", "model.path=<for all steps>"
        yield Unread(keys, "a model from the step before", readers, override)
    if rewarded:
        readers, override = "that model is the reward", "a chain without that step"
        yield Unread("reward.model", "a reward model from the step before", readers, override)


def _rules(settings: Mapping[str, Any], rewarded: bool) -> Iterator[Unread]:
    yield from _model(settings["model"])
    yield from _data(settings["data"], settings["train"]["objective"])
    yield from _training(settings["train"], settings["rl"])
    yield from _adapter(settings["peft"]["kind"])
    yield from _zero(settings["zero"]["stage"])
    if settings["train"]["objective"] not in ONLINE:
        because = f"train.objective={settings['train']['objective']}"
        keys = "rl rl.* rollout rollout.* reward reward.*"
        readers = "only objectives that learn from their own responses read it"
        yield Unread(keys, because, readers, "train=grpo")
    else:
        yield from _online(settings["rl"], settings["rollout"])
        yield from _reward(settings["reward"], rewarded)
    if settings["convert"]["quantize"] == "none":
        own = ("quantize_profile", "group_size", "calibration_rows", "llama_cpp", "max_eval_drop")
        keys = " ".join(f"convert.{name}" for name in own)
        readers, override = "only a quantised version reads it", "convert.quantize=w8a8"
        yield Unread(keys, "convert.quantize=none", readers, override)
    chat = kind_for(settings["train"]["objective"], texts=names_texts(settings["data"]))
    if chat is TEXTS or settings["train"]["objective"] == "reward":
        because = "raw texts" if chat is TEXTS else "train.objective=reward"
        keys = "eval.function eval.timeout_s"
        yield Unread(keys, because, "only responses to prompts are judged", "train=sft")
    elif not settings["eval"]["function"]:
        override = "eval.function=<path.py>:<name>"
        yield Unread("eval.timeout_s", "no eval.function", "nothing is called", override)
    if settings["train"]["objective"] == "reward":
        because, readers = "train.objective=reward", "lm-evaluation-harness needs texts"
        yield Unread(
            "eval.lm_eval eval.lm_eval_limit timeouts.lm_eval_s", because, readers, "train=sft"
        )
    elif not settings["eval"]["lm_eval"]:
        override = "eval.lm_eval=[<task>]"
        keys = "eval.lm_eval_limit timeouts.lm_eval_s"
        yield Unread(keys, "eval.lm_eval=[]", "no task is run", override)
    if settings["smoke"]["engine"] == "transformers":
        keys = "smoke.kv_cache_gib smoke.tensor_parallel"
        yield Unread(keys, "smoke.engine=transformers", "only vLLM reads it", "smoke=vllm")


def _model(model: Mapping[str, Any]) -> Iterator[Unread]:
    if model["kind"] == "toy":
        readers, override = "the embedded model has no path", "model=hf model.path=<folder or id>"
        yield Unread("model.path model.revision", "model.kind=toy", readers, override)
    else:
        readers = "only the embedded model is pre-trained"
        yield Unread("model.steps model.seed", f"model.kind={model['kind']}", readers, "model=toy")
    if model["path"] and Path(model["path"]).expanduser().is_dir():
        readers = "only a Hugging Face id has revisions"
        yield Unread("model.revision", "a folder in model.path", readers, "model.path=owner/name")
    if not model["new_tokens"]:
        readers = "only a vocabulary that grows is padded"
        override = "model.new_tokens=['<tool>']"
        yield Unread("model.vocab_multiple", "no model.new_tokens", readers, override)


_OF_FILES = "data.path data.eval_path"
_OF_HUB = "data.name data.split data.eval_split"
_OF_ROWS = "data.eval_fraction data.*_key data.sources data.stopping data.max_samples"


def _data(data: Mapping[str, Any], objective: str) -> Iterator[Unread]:
    kind = data["kind"]
    because = f"data.kind={kind}"
    if kind == "toy":
        keys = f"{_OF_FILES} {_OF_HUB} {_OF_ROWS} data.on_bad_line data.control_tokens"
        yield Unread(keys, because, "the embedded tasks are no file", "data.path=<file>")
        return
    keys = "data.train_size data.heldout_size data.tasks"
    readers = "only the embedded tasks have them"
    yield Unread(keys, because, readers, "data.max_samples=<rows>")
    if kind in FILE_KINDS:
        yield Unread(_OF_HUB, because, "only a data set of the Hub has it", "data=hub")
    if kind == HUB:
        yield Unread(_OF_FILES, because, "only files have a path", "data.name=owner/name")
    apart = "data.eval_split" if kind == HUB else "data.eval_path"
    if data[apart.partition(".")[2]]:
        readers = "no rows are held out of the training rows"
        yield Unread("data.eval_fraction", apart, readers, f"{apart}=null")
    if not any(source["probability"] for source in data["sources"]):
        readers, override = "only sources with probabilities are mixed", "data.sources=[...]"
        yield Unread("data.stopping", "sources without probabilities", readers, override)
    rows = kind_for(objective, texts=names_texts(data))
    if rows is TEXTS:
        readers, override = "control tokens separate its documents", "rows of messages"
        yield Unread("data.control_tokens", "raw texts", readers, override)
    roles = {role for roles in rows.either for role in roles} | {*rows.extras, "text"}
    others = [key for key in data if key.endswith("_key") and key.removesuffix("_key") not in roles]
    keys, readers = " ".join(f"data.{key}" for key in others), f"rows are {rows.name}"
    yield Unread(keys, f"train.objective={objective}", readers, "another train=<objective>")


def _training(train: Mapping[str, Any], rl: Mapping[str, Any]) -> Iterator[Unread]:
    objective = train["objective"]
    if objective in ONLINE:
        readers, override = "iterations are counted by rl.iterations", "rl.iterations=<number>"
        yield Unread("train.max_steps", f"train.objective={objective}", readers, override)
        if rl["iterations"] is not None:
            yield Unread("train.epochs", "rl.iterations", "iterations win", "rl.iterations=null")
        readers = "lengths are rollout.max_prompt_len and rollout.max_new_tokens"
        override = "rollout.max_new_tokens=<tokens>"
        yield Unread("train.on_overlong", f"train.objective={objective}", readers, override)
    elif train["max_steps"] is not None:
        yield Unread("train.epochs", "train.max_steps", "steps win", "train.max_steps=null")
    if not train["gradient_checkpointing"]:
        keys = "train.gradient_checkpointing_reentrant"
        override = "train.gradient_checkpointing=true"
        yield Unread(keys, "train.gradient_checkpointing=false", "nothing is recomputed", override)
    if train["scheduler"] == "constant":
        readers, override = (
            "its rate is constant from step 1",
            "train.scheduler=constant_with_warmup",
        )
        yield Unread("train.warmup_ratio", "train.scheduler=constant", readers, override)
    if not train["save_steps"] and not train["eval_steps"]:
        keys = "train.max_ckpt_num train.max_ckpt_gb train.keep_ckpts"
        yield Unread(
            keys, "train.save_steps=0", "no checkpoints are written", "train.save_steps=50"
        )


def _adapter(kind: str) -> Iterator[Unread]:
    of_quantised = "peft.quant_type peft.double_quant"
    if kind == "none":
        keys = (
            "peft.rank peft.alpha peft.dropout peft.target_modules peft.exclude_modules "
            "peft.use_* peft.init peft.*_pattern peft.modules_to_save "
            "merge.base merge.rounding "
        )
        yield Unread(keys + of_quantised, "peft.kind=none", "only adapters read it", "peft=lora")
    elif kind == "lora":
        yield Unread(of_quantised, "peft.kind=lora", "only QLoRA quantises the base", "peft=qlora")


def _zero(stage: int) -> Iterator[Unread]:
    if stage < 3:
        keys, readers = "zero.offload_param zero.persistence_threshold", "only ZeRO-3 reads it"
        yield Unread(keys, f"zero.stage={stage}", readers, "zero=zero3")
    if stage < 1:
        keys = "zero.offload_optimizer zero.overlap_comm zero.bucket_size"
        yield Unread(keys, "zero.stage=0", "only ZeRO-1 to 3 read it", "zero=zero2")


def _online(rl: Mapping[str, Any], rollout: Mapping[str, Any]) -> Iterator[Unread]:
    if not rl["kl_coef"]:
        keys = "rl.kl_in rl.kl_estimator"
        yield Unread(keys, "rl.kl_coef=0", "there is no KL penalty", "rl.kl_coef=0.05")
    if rl["kl_target"] is None:
        readers = "the coefficient is fixed"
        yield Unread("rl.kl_horizon", "rl.kl_target=null", readers, "rl.kl_target=0.1")
    limits = {"none": "rl.correction_high rl.correction_low", "tis": "rl.correction_low"}
    if rl["correction"] in limits:
        because = f"rl.correction={rl['correction']}"
        override = "rl.correction=icepop or rl.correction=sequence_mask"
        yield Unread(limits[rl["correction"]], because, "it has no such limit", override)
    if rl["environment"] is None:
        keys = "rl.environment_timeout_s rl.max_turns rl.observation_role"
        override = "rl.environment=<path.py>:<Class>"
        yield Unread(keys, "no rl.environment", "a prompt gets one response", override)
    keys = "rollout.tensor_parallel rollout.kv_cache_gib rollout.gpu_memory"
    if rollout["engine"] == "transformers":
        yield Unread(keys, "rollout.engine=transformers", "only vLLM reads it", "rollout=vllm")
    if rollout["engine"] != "server":
        because = f"rollout.engine={rollout['engine']}"
        mine = "rollout.servers rollout.urls rollout.sync_dir rollout.threads"
        yield Unread(mine, because, "there is no server", "rollout=server")
    elif rollout["urls"]:
        readers = "servers at rollout.urls have settings of their own"
        yield Unread(f"{keys} rollout.threads", "rollout.urls", readers, "rollout.servers=2")


def _reward(reward: Mapping[str, Any], rewarded: bool) -> Iterator[Unread]:
    if not reward["model"] and not rewarded:
        keys = "reward.model_weight reward.normalize"
        override = "reward.model=<folder>"
        yield Unread(keys, "no reward.model", "there is no reward model", override)
    if not reward["function"]:
        override = "reward.function=<path.py>:<name>"
        yield Unread("reward.function_weight", "no reward.function", "nothing is called", override)
    if not reward["url"]:
        keys = "reward.url_weight reward.retries reward.batch"
        yield Unread(keys, "no reward.url", "nothing is requested", "reward.url=<URL>")
        if not reward["function"]:
            readers, override = "nothing is called", "reward.url=<URL>"
            yield Unread("reward.timeout_s", "no reward.url or function", readers, override)
