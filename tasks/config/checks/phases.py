"""Memory of one rank: named terms, and the peak over the phases of an iteration.

    generate   the engine samples: its weights and KV cache, beside the trainer's resident states
    score      policy, reference, critic and reward model score the responses, without gradients
    train      passes and optimizer steps of policy and critic, one model after the other

A run that does not learn from its own responses has the last phase alone. On a CPU the engine's
memory stays; on a GPU it sleeps while ranks score and train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.checks.engine import GIB, EngineMemory, rollout_memory
from tasks.config.checks.model import look_at
from tasks.config.defaults import ONLINE
from tasks.core.machine import gpu_memory
from tasks.rl.algorithms.algorithm_options import WITH_CRITIC
from tasks.rl.rewards.folder import ROW_TOKENS
from tasks.rl.rollout.vllm_support import goes_as_adapter
from tasks.rl.settings import Online
from tasks.training.job import Batch, Settings
from tasks.training.memory.activations import row_bytes
from tasks.training.memory.estimate import (
    ITEM,
    LIBRARIES,
    MemoryEstimate,
    adapter_weights,
    estimate,
)
from tasks.training.memory.sizes import Sizes
from tasks.weights.files.documents import read_json

PHASES = ("generate", "score", "train")
ASLEEP = GIB
"""GPU memory of a sleeping engine: CUDA graphs and workspaces. An estimate, not measured: vLLM only
frees weights and cache (`vllm/device_allocator/cumem.py`)."""


@dataclass(frozen=True)
class Term:
    """A named part of a rank's memory, in bytes, and the phases in which it is allocated."""

    name: str
    size: int
    phases: tuple[str, ...] = PHASES

    def __str__(self) -> str:
        return f"{self.name} {in_words(self.size)}"


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        terms: its parts. In phase `train`, `step` and `communication` are not allocated together
            with activations, so that the peak is less than the sum.
        peaks: peak of each phase.
        least: peak of each phase with the shortest samples.
        host: bytes of states offloaded from a GPU; not included above.
        mapped: part of a CPU rank's weights that the ranks of a node share.
    """

    terms: tuple[Term, ...]
    peaks: Mapping[str, int]
    least: Mapping[str, int]
    host: int = 0
    mapped: int = 0

    @property
    def total(self) -> int:
        """The peak over all phases."""
        return max(self.peaks.values())

    @property
    def states(self) -> int:
        """The peak over all phases with the shortest samples."""
        return max(self.least.values())

    def lines(self) -> list[str]:
        """Return lines with the peak and every term with its phases."""
        phase, peak = max(self.peaks.items(), key=lambda item: item[1])
        each = ", ".join(f"{name} {in_words(size)}" for name, size in self.peaks.items())
        where = f", in phase {phase} ({each})" if len(self.peaks) > 1 else ""
        width = max(len(term.name) for term in self.terms)
        return [
            f"memory a rank: {in_words(peak)} at its peak{where}",
            *(
                f"  {term.name:<{width}}  {in_words(term.size):>11}  {' '.join(term.phases)}"
                for term in self.terms
            ),
        ]

    def needs(self) -> str:
        """Return the terms of the phase that needs most, for a finding."""
        phase = max(self.peaks, key=lambda name: self.peaks[name])
        listed = ", ".join(str(term) for term in self.terms if phase in term.phases)
        return f"{phase}: {listed}"


def in_words(size: int) -> str:
    """Return a size with its unit, such as 14.2 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def memory_of(settings: Mapping[str, Any], *, rewarded: bool = False) -> RankMemory | None:
    """Return the memory of a rank of a run; None if a model's dimensions are not known.

    Args:
        settings: the resolved configuration.
        rewarded: True if an earlier step of the chain trains the reward model, on the same base.
    """
    known, _ = look_at(settings["model"])
    training = training_settings(settings)
    if not known.config or training.world_size < 1:
        return None  # other findings report the reason
    try:
        reward = known.config if rewarded else reward_config(settings["reward"]["model"])
        gpu = gpu_memory(settings["train"]["device"])
        return rank_memory(known.config, training, gpu=gpu, reward=reward)
    except KeyError:
        return None  # an architecture that names its dimensions differently


def training_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings of the training, with the sections of an online objective."""
    names = ("rl", "rollout", "reward") if settings["train"]["objective"] in ONLINE else ()
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    return Settings.from_sections(**sections, online={name: settings[name] for name in names})


def reward_config(folder: str | None) -> Mapping[str, Any] | None:
    """Return the config.json of `reward.model`; None if there is none."""
    path = Path(folder or "").expanduser() / "config.json"
    return read_json(path) if folder and path.is_file() else None


def rank_memory(
    config: Mapping[str, Any],
    training: Settings,
    *,
    gpu: int | None,
    reward: Mapping[str, Any] | None = None,
) -> RankMemory:
    """Add up the memory of a rank of a run.

    Args:
        config: contents of the base's config.json.
        training: settings of the training.
        gpu: bytes of each rank's GPU; None on a CPU.
        reward: contents of the reward model's config.json; None without one.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    policy = estimate(config, training, training.world_size, gpu=gpu is not None)
    if not training.online:
        terms = tuple(Term(name, size, PHASES[2:]) for name, size in policy.parts().items())
        whole, least = {"train": policy.total}, {"train": policy.states}
        return RankMemory(terms, whole, least, policy.host, policy.mapped)
    online = Online.of(training.online)
    engine = _engine(config, training, online, gpu=gpu)
    critic = _critic(config, training, online, gpu=gpu is not None)
    beside = (
        *_frozen(config, training, online, gpu=gpu is not None, reward=reward),
        *(_of_engine(engine, on_gpu=gpu is not None) if engine else ()),
    )
    together = {name: sum(t.size for t in beside if name in t.phases) for name in PHASES}
    models = [model for model in (policy, critic) if model is not None]
    # Models take turns: passes and steps of one, beside the lasting memory of the other.
    lasting = sum(m.lasting for m in models)
    weights, gathered = sum(m.weights for m in models), sum(m.gathered for m in models)
    states = lasting - weights - gathered
    away = gpu is not None and online.rollout.offload_trainer  # except in phase `train`
    alone = {
        "generate": weights + (0 if away else states),
        "score": weights + gathered + (0 if away else states) + max(m.forward for m in models),
    }
    host = sum(m.host for m in models) + (states if away else 0)
    if engine and gpu is not None and goes_as_adapter(training):
        host += engine.weights  # of a sleeping engine; without an adapter the next sync brings them
    whole = {**alone, "train": lasting + max(m.total - m.lasting for m in models)}
    least = {**alone, "train": lasting + max(m.states - m.lasting for m in models)}
    return RankMemory(
        (*_terms(policy, away=away), *_as_critic(critic, away=away), *beside),
        {name: size + together[name] for name, size in whole.items()},
        {name: size + together[name] for name, size in least.items()},
        host,
        sum(m.mapped for m in models),
    )


def _terms(policy: MemoryEstimate, *, away: bool) -> Iterator[Term]:
    stays = policy.gradients > policy.released and not away
    begin = {"weights": 0, "optimizer": 2 * away, "gradients": 0 if stays else 2, "gathered": 1}
    for name, size in policy.parts().items():
        yield Term(name, size, PHASES[begin.get(name, 2) :])
    yield Term("pass without gradients", policy.forward, ("score",))


def _as_critic(critic: MemoryEstimate | None, *, away: bool) -> Iterator[Term]:
    if critic is None:
        return
    yield Term("critic", critic.weights)
    if critic.gathered:
        yield Term("critic, gathered", critic.gathered, PHASES[1:])
    states = critic.lasting - critic.weights - critic.gathered
    yield Term("critic, its optimizer", states, PHASES[2 * away :])
    yield Term("critic, its pass and step", critic.total - critic.lasting, ("train",))


def _critic(
    config: Mapping[str, Any],
    training: Settings,
    online: Online,
    *,
    gpu: bool,
) -> MemoryEstimate | None:
    """Return the memory of the critic: a second model, or an adapter on the policy's trunk."""
    if training.objective not in WITH_CRITIC:
        return None
    model = estimate(config, training, training.world_size, gpu=gpu, critic=True)
    if online.loop.critic == "separate":
        return model
    weights = adapter_weights(Sizes.of(config), training) * ITEM[training.dtype]
    return replace(model, weights=weights, gathered=0, mapped=0)


def _frozen(
    config: Mapping[str, Any],
    training: Settings,
    online: Online,
    *,
    gpu: bool,
    reward: Mapping[str, Any] | None,
) -> Iterator[Term]:
    """Yield the models that are not trained: reference and reward model."""
    loop, item = online.loop, ITEM[training.dtype]
    if training.peft.kind == "none" and (loop.kl_coef > 0 or loop.kl_limit is not None):
        divided = training.world_size if training.zero.stage == 3 else 1
        yield Term("reference", Sizes.of(config).weights() * item // divided)
    if reward is not None:
        yield from _reward_model(reward, training, gpu=gpu)


def _engine(
    config: Mapping[str, Any], training: Settings, online: Online, *, gpu: int | None
) -> EngineMemory | None:
    """Return the memory of vLLM beside a rank, a share of servers on its CPU; None without."""
    rollout = online.rollout
    if rollout.engine == "transformers":
        return None
    settings = {"rollout": asdict(rollout), "model": {"dtype": training.dtype}}
    engine = rollout_memory(config, settings, gpu_bytes=gpu)
    if rollout.engine == "vllm":
        return engine
    if gpu is not None or not rollout.servers:
        return None  # servers have GPUs, or machines, of their own
    share = rollout.servers / training.launch.nproc  # of the servers' memory, for each rank
    parts = {"weights": int(engine.weights * share), "cache": int(engine.cache * share)}
    return replace(engine, **parts)


def _of_engine(engine: EngineMemory, *, on_gpu: bool) -> Iterator[Term]:
    awake = ("generate",) if on_gpu else PHASES
    yield Term("engine weights", engine.weights, awake)
    yield Term("KV cache", engine.cache, awake)
    if on_gpu:  # an awake engine has these within its share
        yield Term("engine activations", LIBRARIES, awake)
        yield Term("engine asleep", ASLEEP, PHASES[1:])


def _reward_model(config: Mapping[str, Any], training: Settings, *, gpu: bool) -> Iterator[Term]:
    """Yield a reward model in the rank's own process, which is not partitioned."""
    sizes, dtype = replace(Sizes.of(config), tied=True), str(config.get("dtype") or "bfloat16")
    item = ITEM.get(dtype, 2)
    yield Term("reward model", sizes.weights() * item)
    row = replace(training, objective="reward", batch=Batch(1, 1, max_len=ROW_TOKENS // 2))
    passing = row_bytes(sizes, row, item=item, gpu=gpu, logits=False).forward
    # The rollout engine is awake while responses are scored.
    yield Term("reward model, its pass", passing, ("generate", "score"))
