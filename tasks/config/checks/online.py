"""Sections `rl`, `rollout` and `reward`, of objectives that learn from their own replies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.config.checks.engine import shareable
from tasks.config.checks.finding import Finding
from tasks.config.checks.model import Known, head_size
from tasks.config.section import read_section
from tasks.core.errors import ArtifactError, ConfigError
from tasks.rl.algorithms import algorithm_options
from tasks.rl.rewards.exact import EXACT_MATCH
from tasks.rl.rewards.folder import RewardFolder
from tasks.rl.rewards.http import TOKEN, redacted
from tasks.rl.rewards.reference import FunctionReference
from tasks.rl.rollout.vllm_support import unservable
from tasks.rl.settings import Loop, Rollout
from tasks.training.job import Settings

SOURCES = ("model", "function", "url")
_NAME_ONE = "reward.model=<folder>, reward.function=<path.py>:<name> or reward.url=<URL>"


def online(
    settings: Mapping[str, Any], known: Known, *, rewarded: bool = False, on_cpu: bool = True
) -> list[Finding]:
    """Everything about an online run that can be told before it.

    Args:
        settings: the resolved configuration.
        known: of the policy's model.
        rewarded: whether a chain's earlier link trains the reward model.
        on_cpu: whether vLLM is the CPU's.
    """
    train, rl = settings["train"], settings["rl"]
    rollout, reward = settings["rollout"], settings["reward"]
    if train["objective"] not in algorithm_options.USES:
        return []
    return [
        *sources(reward, rewarded=rewarded),
        *reward_model(reward, longest=rollout["max_prompt_len"] + rollout["max_new_tokens"]),
        *function(reward["function"]),
        *endpoint(reward["url"]),
        *fits(train["objective"], rl),
        *critic(train["objective"], rl, settings["peft"]["kind"], settings["zero"]["stage"]),
        *steps(rl["prompts"], rl["samples"], train["global_batch_size"]),
        *lengths(rollout, rl["overlong_buffer"], known.context),
        *offload(rollout["offload_trainer"], settings["zero"]),
        *engines(reward, rollout),
        *_served(settings),
        *engine(rollout, train["nproc"] * train["nodes"], known, on_cpu=on_cpu),
        *computes(rollout, train["device"], on_cpu=on_cpu),
    ]


def _served(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Policies that vLLM cannot sample from."""
    if settings["rollout"]["engine"] != "vllm":
        return
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    rollout = read_section(Rollout, settings["rollout"], "rollout")
    for one in unservable(Settings.from_sections(**sections), rollout):
        yield Finding(*one)


def sources(reward: Mapping[str, Any], *, rewarded: bool) -> Iterator[Finding]:
    """At least one source has to be there, and to count for something."""
    named = [name for name in SOURCES if reward[name] or (name == "model" and rewarded)]
    if not named:
        yield Finding(
            "reward", "no source", "something has to say what a reply is worth", _NAME_ONE
        )
        return
    weights = {name: float(reward[f"{name}_weight"]) for name in named}
    for name, weight in weights.items():
        if not math.isfinite(weight):
            key = f"reward.{name}_weight"
            yield Finding(key, str(weight), "a finite number", f"{key}=1")
    if not any(weights.values()):
        found = ", ".join(f"reward.{name}_weight=0" for name in named)
        allowed = "every reply would be worth the same"
        yield Finding("reward", found, allowed, f"reward.{named[0]}_weight=1")


def reward_model(reward: Mapping[str, Any], *, longest: int) -> Iterator[Finding]:
    """The reward model's folder, and whether it reads texts of `longest` tokens."""
    if not reward["model"]:
        return
    try:
        found = RewardFolder.read(Path(reward["model"]).expanduser(), normalize=reward["normalize"])
    except ArtifactError as error:
        yield _as_finding("reward.model", error, "a served reward model")
        return
    if found.context is not None and longest > found.context:
        yield Finding(
            "reward.model",
            f"texts of up to {longest} tokens (rollout.max_prompt_len + rollout.max_new_tokens)",
            f"its context is {found.context}",
            f"rollout.max_prompt_len={max(1, found.context // 2)} "
            f"rollout.max_new_tokens={max(1, found.context // 2)}",
        )


def function(text: str | None) -> Iterator[Finding]:
    """`path.py:name`, told without running the file."""
    if not text or text == EXACT_MATCH:
        return
    try:
        FunctionReference.of(text).require()
    except ConfigError as error:
        yield _as_finding("reward.function", error, "a function in a file that is there")


def endpoint(url: str | None) -> Iterator[Finding]:
    """An address that can be asked, and shows no secret to whoever reads the configuration."""
    if not url:
        return
    key, example = "reward.url", "reward.url=http://<host>:<port>/<path>"
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # brackets, ports
        yield Finding(key, f"{url}: {error}", "http or https, and a host", example)
        return
    if not whole:
        yield Finding(key, redacted(url), "http or https, and a host", example)
    elif parts.password:
        allowed = f"a password would be in every record of the run; {TOKEN}=<token> is read instead"
        yield Finding(key, redacted(url), allowed, example)


def fits(objective: str, rl: Mapping[str, Any]) -> Iterator[Finding]:
    """What of section `rl` the algorithm does not use, or cannot do with."""
    for one in algorithm_options.findings(objective, read_section(Loop, rl, "rl")):
        yield Finding(*one)


def critic(objective: str, rl: Mapping[str, Any], peft: str, stage: int) -> Iterator[Finding]:
    """A critic that shares the policy's trunk needs one that is frozen, and whole on every rank.

    While any critic warms up, the policy does not move.
    """
    if objective not in algorithm_options.WITH_CRITIC:
        return
    warmup, iterations = rl["critic_warmup"], rl["iterations"]
    if iterations is not None and warmup >= iterations:
        found = f"{warmup} with rl.iterations={iterations}"
        allowed = "fewer than all iterations: in those only the critic learns, and no policy would"
        yield Finding("rl.critic_warmup", found, allowed, f"rl.iterations={warmup + 1} or more")
    if rl["critic"] != "shared":
        return
    if peft == "none":
        allowed = "separate: a policy that is trained whole has no trunk to share"
        yield Finding("rl.critic", "shared with peft=none", allowed, "rl.critic=separate")
    if stage == 3:
        allowed = "separate: two engines cannot gather the same parameters"
        yield Finding("rl.critic", "shared with zero=zero3", allowed, "rl.critic=separate")


def steps(prompts: int, samples: int, global_size: int) -> Iterator[Finding]:
    """An iteration's replies are taken by optimizer steps without a rest."""
    replies = prompts * samples
    if min(prompts, samples, global_size) < 1 or replies % global_size == 0:
        return  # numbers below one are found elsewhere
    whole = max(1, round(replies / global_size)) * global_size
    fits = [f"rl.prompts={whole // samples}"] if whole % samples == 0 else []
    yield Finding(
        "rl.prompts and rl.samples",
        f"{prompts} x {samples} = {replies} replies an iteration",
        f"a multiple of train.global_batch_size={global_size}, the replies of an optimizer step",
        " or ".join([*fits, f"train.global_batch_size={_largest_divisor(replies, global_size)}"]),
    )


def lengths(rollout: Mapping[str, Any], buffer: int, context: int | None) -> Iterator[Finding]:
    """Prompt and reply together have to fit into the model's context. Tokens."""
    prompt, reply = rollout["max_prompt_len"], rollout["max_new_tokens"]
    if context is not None and prompt + reply > context:
        room = context - reply
        key, size = ("max_prompt_len", room) if room > 0 else ("max_new_tokens", context // 2)
        yield Finding(
            "rollout.max_prompt_len",
            f"{prompt} + rollout.max_new_tokens={reply}",
            f"together at most the model's context, {context}",
            f"rollout.{key}={size}",
        )
    if buffer > reply:
        allowed = f"at most rollout.max_new_tokens={reply}: the last tokens of a reply"
        override = f"rl.overlong_buffer={max(0, reply // 4)}"
        yield Finding("rl.overlong_buffer", str(buffer), allowed, override)


def offload(wanted: bool, zero: Mapping[str, Any]) -> Iterator[Finding]:
    """DeepSpeed moves states that ZeRO splits, and that lie on the device."""
    key, override = "rollout.offload_trainer", "rollout.offload_trainer=false"
    if wanted and zero["stage"] < 1:
        yield Finding(key, "true with ZeRO-0", "needs ZeRO-1 to 3", f"zero=zero2 or {override}")
    for name in ("offload_optimizer", "offload_param"):
        if wanted and zero.get(name, "none") != "none":
            conflict = f"true with zero.{name}={zero[name]}"
            yield Finding(key, conflict, "one of the two: either moves the states", override)


def engines(reward: Mapping[str, Any], rollout: Mapping[str, Any]) -> Iterator[Finding]:
    """vLLM shares all engines of a process out over its ranks in the same way."""
    parallel = rollout["tensor_parallel"]
    if reward["engine"] == "vllm" and rollout["engine"] == "vllm" and parallel != 1:
        found = f"vllm with rollout.tensor_parallel={parallel}"
        allowed = "a reward model in vLLM is whole on every rank, and so must the policy be"
        yield Finding("reward.engine", found, allowed, "reward.engine=process")


def engine(
    rollout: Mapping[str, Any], world: int, known: Known, *, on_cpu: bool
) -> Iterator[Finding]:
    """What vLLM cannot do for a training rank."""
    if rollout["engine"] != "vllm":
        return
    for finding in head_size("vllm", on_cpu, known):
        yield replace(finding, what="rollout.engine", override="rollout=transformers")
    parallel = rollout["tensor_parallel"]
    if parallel >= 1 and world % parallel:
        allowed = f"engines share the {world} ranks (train.nproc x train.nodes) out evenly"
        override = f"rollout.tensor_parallel={_largest_divisor(world, parallel)}"
        yield Finding("rollout.tensor_parallel", str(parallel), allowed, override)
    else:
        yield from shareable("rollout.tensor_parallel", parallel, known.config)


def computes(rollout: Mapping[str, Any], device: str, *, on_cpu: bool) -> Iterator[Finding]:
    """A vLLM for GPUs within ranks that see none."""
    if rollout["engine"] == "vllm" and device == "cpu" and not on_cpu:
        allowed = "the installed vLLM computes on GPUs, and with train.device=cpu ranks see none"
        yield Finding("rollout.engine", "vllm", allowed, "rollout=transformers")


def _as_finding(key: str, error: ArtifactError | ConfigError, allowed: str) -> Finding:
    """An error about a key's value, which its message begins with."""
    return Finding(key, error.message.removeprefix(f"{key}="), allowed, error.hint)


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(one for one in range(1, min(number, most) + 1) if number % one == 0)
