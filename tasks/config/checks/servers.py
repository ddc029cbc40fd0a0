"""Servers of `rollout=server`: their number, addresses and GPUs, and what they can do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.config.checks.engine import shareable
from tasks.config.checks.model import Known, vllm_serves
from tasks.config.section import read_section
from tasks.core import machine as host
from tasks.core.finding import Finding
from tasks.core.redaction import redact
from tasks.rl.rollout.vllm_support import goes_as_adapter, served_rank
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Colocation, Sampling
from tasks.training.job import Settings

_EITHER = "rollout.servers=2, or rollout.urls=[http://<host>:8000]"


def servers(settings: Mapping[str, Any], known: Known, *, on_cpu: bool) -> list[Finding]:
    """Return the findings about the servers; none with another engine.

    Args:
        settings: the resolved configuration.
        known: facts about the policy's model.
        on_cpu: True if the installed vLLM is the one for CPUs.
    """
    rollout, train = settings["rollout"], settings["train"]
    problems = list(staleness(settings))
    if rollout["engine"] != "server":
        return problems
    count, urls = rollout["servers"], list(rollout["urls"])
    if bool(count) == bool(urls):
        value = f"{count} with rollout.urls={urls}"
        return [*problems, Finding("rollout.servers", value, "one of the two", _EITHER)]
    problems += sync_dir(rollout["sync_dir"], urls)
    if urls:
        return [*problems, *addresses(urls)]
    gpus = host.gpu_count() if host.has_gpu(train["device"]) else 0
    return [*problems, *_started(rollout, train["nproc"], known, gpus=gpus, on_cpu=on_cpu)]


def staleness(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that responses can be sampled beside an update, and that their age is corrected for.

    Args:
        settings: the resolved configuration.
    """
    rl, train, engine = settings["rl"], settings["train"], settings["rollout"]["engine"]
    if not rl["staleness"]:
        return
    key, override = "rl.staleness", "rl.staleness=0"
    if engine != "server":
        value = f"{rl['staleness']} with rollout.engine={engine}"
        allowed = "only servers sample while the ranks train"
        yield Finding(key, value, allowed, f"rollout=server rollout.servers=2, or {override}")
    if rl["environment"] is not None:
        value = f"{rl['staleness']} with rl.environment"
        allowed = "a turn is sampled after the environment has answered the one before"
        yield Finding(key, value, allowed, override)
    if rl["correction"] == "none":
        value = f"{rl['staleness']} with rl.correction=none"
        allowed = "responses of an older version need importance weights"
        yield Finding(key, value, allowed, f"rl.correction=tis, or {override}")
    for name in ("save_steps", "eval_steps"):
        saves = name == "save_steps" or train["keep"] == "best" or train["save_steps"]
        if train[name] == 1 and saves:
            value = f"{rl['staleness']} with train.{name}=1"
            allowed = "nothing is sampled ahead over a checkpoint, so that runs can be resumed"
            yield Finding(key, value, allowed, f"train.{name}=10, or {override}")


def addresses(urls: list[str]) -> Iterator[Finding]:
    """Check that each address is one of a server, and that none is there twice."""
    key, example = "rollout.urls", "rollout.urls=[http://<host>:8000]"
    for url in urls:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets, ports
            valid, parts = False, urlsplit("")
        if not valid or parts.path.strip("/") or parts.query:
            allowed = "http or https, a host and a port, without a path (no /v1)"
            yield Finding(key, redact(url), allowed, example)
        elif parts.username or parts.password:
            allowed = "no login in it: a run records its settings"
            yield Finding(key, redact(url), allowed, "export PLUMBLINE_API_KEY=<key>")
    for url in {url for url in urls if urls.count(url) > 1}:
        yield Finding(key, f"{redact(url)} twice", "each server once", example)


def sync_dir(folder: str | None, urls: list[str]) -> Iterator[Finding]:
    """Check that servers can read the weights: on other machines they need a shared folder.

    Args:
        folder: `rollout.sync_dir`.
        urls: `rollout.urls`.
    """
    key, override = "rollout.sync_dir", "rollout.sync_dir=/<folder that all machines mount>"
    away = [url for url in urls if not _is_loopback(urlsplit(url).hostname)]
    if folder is None:
        if away:
            value = f"none, with a server at {redact(away[0])}"
            allowed = "servers on other machines read new weights from a shared folder"
            yield Finding(key, value, allowed, override)
        return
    path = Path(folder).expanduser()
    if not path.is_absolute():
        yield Finding(key, folder, "an absolute path, the same on all machines", override)
        return
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding(key, folder, f"a folder that can be written; {there} cannot", override)


def able(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Ask the servers at `rollout.urls` whether they can sample responses of this policy.

    Args:
        settings: the resolved configuration, without other findings about servers.
    """
    rollout = read_section(Rollout, settings["rollout"], "rollout")
    if rollout.engine != "server" or not rollout.urls:
        return
    # An HTTP client takes a tenth of a second to import, and few runs have servers.
    from tasks.serving.rollout_servers.remote import RemoteServer
    from tasks.serving.rollout_servers.started import typed_command

    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    training = Settings.from_sections(**sections)
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


def _started(
    rollout: Mapping[str, Any], nproc: int, known: Known, *, gpus: int, on_cpu: bool
) -> Iterator[Finding]:
    for finding in vllm_serves("server", on_cpu, known):
        yield replace(finding, what="rollout.engine", override="rollout=transformers")
    count, parallel = rollout["servers"], rollout["tensor_parallel"]
    if on_cpu and parallel > 1:
        allowed = "1 on a CPU: servers share its cores, not a model"
        yield Finding(
            "rollout.tensor_parallel", str(parallel), allowed, "rollout.tensor_parallel=1"
        )
    elif not gpus and not on_cpu:
        allowed = "the installed vLLM computes on GPUs, and ranks see none"
        yield Finding("rollout.engine", "server", allowed, "rollout=transformers")
    elif gpus and gpus < nproc + count * parallel:
        value = f"{count} x rollout.tensor_parallel={parallel}, beside train.nproc={nproc}"
        allowed = f"GPUs of their own, and {gpus} are visible"
        fits = max(1, gpus - count * parallel)
        yield Finding("rollout.servers", value, allowed, f"train.nproc={fits}, or rollout=vllm")
    else:
        yield from shareable("rollout.tensor_parallel", parallel, known.config)


def _is_loopback(name: str | None) -> bool:
    try:
        return ip_address(name or "").is_loopback
    except ValueError:
        return name == "localhost"
