"""The order in which an engine inside a training rank frees its memory and takes it again.

A stand-in records vLLM's calls, since vLLM sleeps on GPUs only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.core.errors import TrainingError
from tasks.rl.rollout import vllm_engine
from tasks.rl.rollout.engines import Engine
from tasks.rl.rollout.policy_sync import Policy
from tasks.serving.vllm import rollouts
from tasks.serving.vllm.guest import undisturbed
from tasks.training.engine.offload import TrainerStates
from tasks.training.job import Peft, TrainJob
from tests.rl.rollout.test_handoff import Alone
from tests.settings import Rollout, Settings


class Recorder:
    """Stand-in for vLLM's `LLM`; `calls` records the calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((name, [key for key, _ in kwargs["weights_iterator"]]))

    def reset_prefix_cache(self) -> None:
        self.calls.append(("generate",))


class NoChecks:
    """Stand-in for `LoadedWeights`, which `test_rollouts.py` tests."""

    def __init__(self, _: Any) -> None:
        pass

    def recorded(self, tensors: Any, *_: Any) -> Iterator[Any]:
        return iter(tensors)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of vLLM as on a GPU."""
    made: list[Any] = []
    monkeypatch.setattr(rollouts, "on_gpu", lambda: True)
    monkeypatch.setattr(rollouts, "_start", lambda *_: Recorder(made))
    monkeypatch.setattr(rollouts, "LoadedWeights", NoChecks)
    monkeypatch.setattr(vllm_engine.VllmEngine, "_facts", None)
    tensors = [("a.weight", torch.ones(1))]
    monkeypatch.setattr(vllm_engine, "merged_tensors", lambda *_: iter(tensors))
    monkeypatch.setattr(rollouts.Colocated, "load_adapter", _load_adapter)
    return made


def _load_adapter(self: Any, _: Path, version: int) -> None:
    self._llm.calls.append(("adapter", version))
    self.version = version


class Trained(Policy):
    """A policy whose sync needs no tensors."""

    def advance(self) -> int:
        self.version += 1
        return self.version

    def require_current(self, version: int) -> None:
        if version != self.version:
            raise TrainingError(f"holds version {version}")

    largest_rank = 8
    nbytes = 0

    def adapter_folder(self) -> Any:
        return nullcontext(Path())


def engine(kind: str, folder: Path) -> Engine:
    job = TrainJob(Settings(objective="grpo", peft=Peft(kind)), folder, "b", folder, folder, folder)
    module = torch.nn.Linear(1, 1)
    policy = Trained(SimpleNamespace(module=module), job, Alone())  # type: ignore[arg-type]
    return vllm_engine.VllmEngine(policy, Rollout(), ends=(1,))


def test_full_weights_are_dropped_and_come_back_before_the_cache(
    calls: list[Any], tmp_path: Path
) -> None:
    answering = engine("none", tmp_path)
    answering.sync_weights()
    answering.generate([])
    answering.sleep()
    answering.sleep()
    with pytest.raises(TrainingError, match="holds version 0"):
        answering.generate([])
    answering.sync_weights()
    answering.generate([])
    answering.generate([])
    reloaded = ("reload_weights", ["a.weight"])
    assert calls == [
        reloaded, ("generate",), ("sleep", 2), ("wake", "weights"), reloaded,
        ("wake", "kv_cache"), ("generate",), ("generate",),
    ]  # fmt: skip


def test_weights_below_an_adapter_are_kept(calls: list[Any], tmp_path: Path) -> None:
    answering = engine("lora", tmp_path)
    answering.sync_weights()
    answering.sleep()
    answering.generate([])
    answering.sleep()
    answering.sync_weights()
    answering.generate([])
    both = [("wake", "weights"), ("wake", "kv_cache")]
    assert calls == [
        ("adapter", 1), ("sleep", 1), *both, ("generate",),
        ("sleep", 1), both[0], ("adapter", 2), both[1], ("generate",),
    ]  # fmt: skip


def test_a_sleeping_engine_is_not_closed(calls: list[Any], tmp_path: Path) -> None:
    """A sleeping engine has freed its memory; vLLM would unmap it a second time."""
    answering = engine("lora", tmp_path)
    answering.sync_weights()
    answering.sleep()
    answering.close()  # the stand-in has no `engine_core`
    assert calls == [("adapter", 1), ("sleep", 1)]


def test_restoring_generators_does_not_hide_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(_: Any) -> None:
        raise RuntimeError("Generator not registered with the capturing graph")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restore)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(1))
    with pytest.raises(RuntimeError, match="no room for the cache"), undisturbed():
        raise RuntimeError("no room for the cache")


class Zero:
    """DeepSpeed's engine with a real optimizer; records the states that it has to move."""

    def __init__(self, stage: int, calls: list[Any]) -> None:
        weights = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weights])
        weights.sum().backward()
        optimizer.step()
        self.optimizer = SimpleNamespace(
            optimizer=optimizer, fp32_partitioned_groups_flat=[weights]
        )
        self.stage, self.calls = stage, calls

    def zero_optimization_stage(self) -> int:
        return self.stage

    def offload_states(self, include: Any) -> None:
        self.calls.append(sorted(state.value for state in include))

    def reload_states(self) -> None:
        self.calls.append("reload")


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        (2, ["hp_params", "lp_grads", "optim_states"]),
        # DeepSpeed 0.19 refuses the others with torch's AdamW: they are moved here.
        (3, ["contiguous_grad_buffer", "lp_grads"]),
    ],
)
def test_states_are_moved_once_and_back(stage: int, named: list[str]) -> None:
    calls: list[Any] = []
    engine = Zero(stage, calls)
    (weights,) = engine.optimizer.fp32_partitioned_groups_flat
    before, copy = weights.data_ptr(), weights.detach().clone()
    states = TrainerStates([engine], movable=True)
    states.offload()
    states.offload()
    assert (states.away, calls) == (True, [named])
    assert (weights.data_ptr() != before) is (stage == 3)
    with states.on_device():
        assert (states.away, calls[1:]) == (False, ["reload"])
    assert calls == [named, "reload", named]
    assert torch.equal(weights, copy)


def test_states_that_stay_are_not_touched() -> None:
    states = TrainerStates([object()], movable=False)
    states.offload()
    with states.on_device():
        assert not states.away
