"""Sections `rl`, `rollout` and `reward`, for objectives that learn from their own responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.config.checks.engine import shareable
from tasks.config.checks.environment import environment
from tasks.config.checks.model import Known, vllm_serves
from tasks.config.section import read_section
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.finding import Finding
from tasks.core.redaction import redact
from tasks.rl.algorithms import algorithm_options
from tasks.rl.rewards.folder import RewardFolder
from tasks.rl.rewards.function import EXACT_MATCH
from tasks.rl.rollout.vllm_support import unservable
from tasks.rl.settings import Loop, Rollout
from tasks.rl.user_code import REWARD, FunctionReference
from tasks.training.job import Settings

SOURCES = ("model", "function", "url")
_NAME_ONE = "reward.model=<folder>, reward.function=<path.py>:<name> or reward.url=<URL>"


def online(
    settings: Mapping[str, Any], known: Known, *, rewarded: bool = False, on_cpu: bool = True
) -> list[Finding]:
    """Return the findings about an online run; none for other objectives.

    Args:
        settings: the resolved configuration.
        known: facts about the policy's model.
        rewarded: True if an earlier step of the chain trains the reward model.
        on_cpu: True if the installed vLLM is the one for CPUs.
    """
    train, rl = settings["train"], settings["rl"]
    rollout, reward = settings["rollout"], settings["reward"]
    if train["objective"] not in algorithm_options.TERMS:
        return []
    return [
        *sources(reward, rewarded=rewarded, played=rl["environment"] is not None),
        *reward_model(reward, longest=rollout["max_prompt_len"] + rollout["max_new_tokens"]),
        *function(reward["function"]),
        *endpoint(reward["url"]),
        *environment(settings),
        *algorithm_options.findings(train["objective"], read_section(Loop, rl, "rl")),
        *critic(train["objective"], rl, settings["peft"]["kind"], settings["zero"]["stage"]),
        *steps(rl["rollout_batch_size"], rl["num_generations"], train["global_batch_size"]),
        *lengths(rollout, rl["overlong_buffer"], known.context),
        *offload(rollout["offload_trainer"], settings["zero"]),
        *_served(settings),
        *engine(rollout, train["nproc"] * train["nodes"], known, on_cpu=on_cpu),
        *computes(rollout, train["device"], on_cpu=on_cpu),
    ]


def _served(settings: Mapping[str, Any]) -> list[Finding]:
    """Refuse policies that vLLM cannot sample from."""
    if settings["rollout"]["engine"] == "transformers":
        return []
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    rollout = read_section(Rollout, settings["rollout"], "rollout")
    return unservable(Settings.from_sections(**sections), rollout)


def sources(
    reward: Mapping[str, Any], *, rewarded: bool, played: bool = False
) -> Iterator[Finding]:
    """Check that there is a reward source whose weight is not 0.

    Args:
        reward: the section.
        rewarded: True if an earlier step of the chain trains the reward model.
        played: True if an environment gives rewards too.
    """
    named = [name for name in SOURCES if reward[name] or (name == "model" and rewarded)]
    if not named and played:
        return
    if not named:
        yield Finding("reward", "no source", "responses need a reward", _NAME_ONE)
        return
    weights = {name: float(reward[f"{name}_weight"]) for name in named}
    for name, weight in weights.items():
        if not math.isfinite(weight):
            key = f"reward.{name}_weight"
            yield Finding(key, str(weight), "a finite number", f"{key}=1")
    if not any(weights.values()) and not played:
        zeros = ", ".join(f"reward.{name}_weight=0" for name in named)
        allowed = "all responses would have the same reward"
        yield Finding("reward", zeros, allowed, f"reward.{named[0]}_weight=1")


def reward_model(reward: Mapping[str, Any], *, longest: int) -> Iterator[Finding]:
    """Check the reward model's folder and context.

    Args:
        reward: the section.
        longest: tokens of the longest prompt with its response.
    """
    if not reward["model"]:
        return
    try:
        model = RewardFolder.read(Path(reward["model"]).expanduser(), normalize=reward["normalize"])
    except ArtifactError as error:
        yield _as_finding("reward.model", error, "a served reward model")
        return
    if model.context is not None and longest > model.context:
        yield Finding(
            "reward.model",
            f"texts of up to {longest} tokens (rollout.max_prompt_len + rollout.max_new_tokens)",
            f"its context is {model.context}",
            f"rollout.max_prompt_len={max(1, model.context // 2)} "
            f"rollout.max_new_tokens={max(1, model.context // 2)}",
        )


def function(text: str | None, setting: str = REWARD) -> Iterator[Finding]:
    """Check that `path.py:name` exists, without running the file."""
    if not text or (text == EXACT_MATCH and setting == REWARD):
        return
    try:
        FunctionReference.of(text, setting).require()
    except ConfigError as error:
        yield _as_finding(setting, error, "a function in an existing file")


def endpoint(url: str | None) -> Iterator[Finding]:
    """Check that the URL is valid."""
    if not url:
        return
    key, example = "reward.url", "reward.url=http://<host>:<port>/<path>"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # brackets, ports
        yield Finding(key, f"{redact(url)}: {error}", "http or https, and a host", example)
        return
    if not valid:
        yield Finding(key, redact(url), "http or https, and a host", example)


def critic(objective: str, rl: Mapping[str, Any], peft: str, stage: int) -> Iterator[Finding]:
    """Check the critic: a shared one needs a frozen trunk that is not partitioned.

    Args:
        objective: `train.objective`.
        rl: the section.
        peft: `peft.kind`.
        stage: `zero.stage`.
    """
    if objective not in algorithm_options.WITH_CRITIC:
        return
    warmup, iterations = rl["critic_warmup"], rl["iterations"]
    if iterations is not None and warmup >= iterations:
        value = f"{warmup} with rl.iterations={iterations}"
        allowed = "fewer than all iterations: the policy does not learn during the warm-up"
        yield Finding("rl.critic_warmup", value, allowed, f"rl.iterations={warmup + 1} or more")
    if rl["critic"] != "shared":
        return
    if peft == "none":
        allowed = "separate: full fine-tuning leaves no frozen trunk to share"
        yield Finding("rl.critic", "shared with peft=none", allowed, "rl.critic=separate")
    if stage == 3:
        allowed = "separate: two engines cannot gather the same parameters"
        yield Finding("rl.critic", "shared with zero=zero3", allowed, "rl.critic=separate")


def steps(prompts: int, samples: int, global_size: int) -> Iterator[Finding]:
    """Check that an iteration's responses fill a whole number of optimizer steps.

    Args:
        prompts: `rl.rollout_batch_size`.
        samples: `rl.num_generations`.
        global_size: `train.global_batch_size`, responses.
    """
    responses = prompts * samples
    if min(prompts, samples, global_size) < 1 or responses % global_size == 0:
        return  # other checks report numbers below 1
    nearest = max(1, round(responses / global_size)) * global_size
    fits = [f"rl.rollout_batch_size={nearest // samples}"] if nearest % samples == 0 else []
    yield Finding(
        "rl.rollout_batch_size and rl.num_generations",
        f"{prompts} x {samples} = {responses} responses per iteration",
        f"a multiple of train.global_batch_size={global_size}, the responses of an optimizer step",
        " or ".join([*fits, f"train.global_batch_size={_largest_divisor(responses, global_size)}"]),
    )


def lengths(rollout: Mapping[str, Any], buffer: int, context: int | None) -> Iterator[Finding]:
    """Check that prompt and response fit into the model's context.

    Args:
        rollout: the section.
        buffer: `rl.overlong_buffer`, tokens.
        context: of the model, tokens; None if unknown.
    """
    prompt, response = rollout["max_prompt_len"], rollout["max_new_tokens"]
    if context is not None and prompt + response > context:
        room = context - response
        key, size = ("max_prompt_len", room) if room > 0 else ("max_new_tokens", context // 2)
        yield Finding(
            "rollout.max_prompt_len",
            f"{prompt} + rollout.max_new_tokens={response}",
            f"together at most the model's context, {context}",
            f"rollout.{key}={size}",
        )
    if buffer > response:
        allowed = f"at most rollout.max_new_tokens={response}: the last tokens of a response"
        override = f"rl.overlong_buffer={max(0, response // 4)}"
        yield Finding("rl.overlong_buffer", str(buffer), allowed, override)


def offload(wanted: bool, zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that DeepSpeed can offload the states: ZeRO partitions them, and nothing else does.

    Args:
        wanted: `rollout.offload_trainer`.
        zero: the section.
    """
    key, override = "rollout.offload_trainer", "rollout.offload_trainer=false"
    if wanted and zero["stage"] < 1:
        yield Finding(key, "true with ZeRO-0", "needs ZeRO-1 to 3", f"zero=zero2 or {override}")
    for name in ("offload_optimizer", "offload_param"):
        if wanted and zero.get(name, "none") != "none":
            conflict = f"true with zero.{name}={zero[name]}"
            yield Finding(key, conflict, "one of the two: both move the states", override)


def engine(
    rollout: Mapping[str, Any], world: int, known: Known, *, on_cpu: bool
) -> Iterator[Finding]:
    """Check that vLLM can serve the model within the training ranks.

    Args:
        rollout: the section.
        world: number of ranks.
        known: facts about the policy's model.
        on_cpu: True if the installed vLLM is the one for CPUs.
    """
    if rollout["engine"] != "vllm":
        return
    for finding in vllm_serves("vllm", on_cpu, known):
        yield replace(finding, what="rollout.engine", override="rollout=transformers")
    parallel = rollout["tensor_parallel"]
    if parallel >= 1 and world % parallel:
        allowed = f"a divisor of the {world} ranks (train.nproc x train.nodes)"
        override = f"rollout.tensor_parallel={_largest_divisor(world, parallel)}"
        yield Finding("rollout.tensor_parallel", str(parallel), allowed, override)
    else:
        yield from shareable("rollout.tensor_parallel", parallel, known.config)


def computes(rollout: Mapping[str, Any], device: str, *, on_cpu: bool) -> Iterator[Finding]:
    """Refuse a vLLM for GPUs in ranks that train on CPUs."""
    if rollout["engine"] == "vllm" and device == "cpu" and not on_cpu:
        allowed = "the installed vLLM computes on GPUs, and with train.device=cpu ranks see none"
        yield Finding("rollout.engine", "vllm", allowed, "rollout=transformers")


def _as_finding(key: str, error: ArtifactError | ConfigError, allowed: str) -> Finding:
    """Return an error about the value of a key as a finding."""
    return Finding(key, error.message.removeprefix(f"{key}="), allowed, error.hint)


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    return max(size for size in range(1, min(number, most) + 1) if number % size == 0)
