"""Faults after which an engine or a server computes with other weights than were sent to it.

Each fault is planted in vLLM for one sync and then removed. vLLM itself reports none of them: it
has an adapter with the right id, or has loaded what was sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tasks.core.errors import PlumblineError
from tasks.rl.rollout.servers import ServerEngine
from tasks.serving.rollout_servers import RemoteServer

Plant = Callable[[Any, Any], AbstractContextManager[None]]


def require_noticed(bench: Any, answering: Any, mine: Any) -> None:
    """Plant each fault for one sync, and assert that the error names it; then sync without it."""
    for fault, named in faults_of(answering).items():
        bench.perturb(0.002 if isinstance(answering, ServerEngine) else 0.02)
        with fault(bench, answering):
            noticed = failure(lambda: (answering.sync_weights(), answering.generate(mine)))
        assert named in noticed, (fault, noticed)
        again = failure(lambda: (answering.sync_weights(), answering.generate(mine)))
        assert not again, (fault, again)


def faults_of(answering: Any) -> dict[Plant, str]:
    """Return the faults of an engine, with a word of the error; none where they cannot be made."""
    as_adapter, servers = answering.policy.as_adapter, isinstance(answering, ServerEngine)
    if servers:
        names = ("old adapter", "base") if as_adapter else ("reload does nothing",)
        return {partial(_stale_server, name): "http://127.0.0.1:" for name in names}
    if not as_adapter:
        return {_reload_does_nothing: "vLLM of rank"}
    return {
        _stale_adapter: "layers.0.self_attn.q_proj.lora_A.weight",
        _one_module_left_out: "layers.1.self_attn.k_proj.lora_A.weight",
        _adapter_lost_on_wake: "layers.0.self_attn.qkv_proj.lora_A.0",
        _base_lost_on_wake: "model.norm.weight",
        _adapter_not_used: "[0]",
    }


def failure(work: Callable[[], Any]) -> str:
    """Return the error of `work` as a text; empty if there is none."""
    try:
        work()
    except PlumblineError as error:
        return f"{type(error).__name__}: {error.message} | {error.hint}"
    return ""


@contextmanager
def _stale_adapter(bench: Any, answering: Any) -> Iterator[None]:
    """The new id with the tensors of the previous adapter."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    right = WorkerLoRAManager._load_adapter
    kept: list[Any] = []

    def load(self: Any, request: Any) -> Any:
        kept.append(right(self, request))
        return kept[0].clone(request.lora_int_id)

    with patch.object(WorkerLoRAManager, "_load_adapter", load):
        answering.sync_weights()
        bench.perturb(0.02)
        yield


@contextmanager
def _one_module_left_out(bench: Any, answering: Any) -> Iterator[None]:
    from vllm.lora.model_manager import LoRAModelManager

    right = LoRAModelManager._get_lora_layer_weights

    def get(self: Any, lora: Any, name: str) -> Any:
        return None if name == "model.layers.1.self_attn.k_proj" else right(self, lora, name)

    with patch.object(LoRAModelManager, "_get_lora_layer_weights", get):
        yield


@contextmanager
def _adapter_not_used(bench: Any, answering: Any) -> Iterator[None]:
    """Requests lose their adapter on the way to the worker, so the base generates."""
    manager = _worker(answering).model_runner.lora_manager
    right = manager.set_active_adapters

    def without(requests: Any, mapping: Any) -> None:
        prompts, tokens = mapping.prompt_mapping, mapping.index_mapping
        mapping.prompt_mapping, mapping.index_mapping = (0,) * len(prompts), (0,) * len(tokens)
        right(set(), mapping)

    with patch.object(manager, "set_active_adapters", without):
        yield
    # The error ends a run; here, the responses that were not finished then would go on.
    core = answering._engine._llm.llm_engine
    core.abort_request([*core.output_processor.request_states], internal=True)


@contextmanager
def _adapter_lost_on_wake(bench: Any, answering: Any) -> Iterator[None]:
    """A wake frees the memory of the adapter slots."""
    layers = _worker(answering).model_runner.lora_manager._adapter_manager.modules.values()
    with _after_wake(answering, lambda: [layer.reset_lora(0) for layer in layers]):
        yield


@contextmanager
def _base_lost_on_wake(bench: Any, answering: Any) -> Iterator[None]:
    """The layers below the adapter have other numbers after a wake."""
    norm = _worker(answering).get_model().get_submodule("model.norm")
    kept = norm.weight.data.clone()
    try:
        with _after_wake(answering, lambda: norm.weight.data.mul_(1.5)):
            yield
    finally:
        norm.weight.data.copy_(kept)


@contextmanager
def _reload_does_nothing(bench: Any, answering: Any) -> Iterator[None]:
    """The engine accepts new weights and keeps the old ones."""
    runner = _worker(answering).model_runner
    with patch.object(runner, "reload_weights", lambda weights_iterator: list(weights_iterator)):
        yield


@contextmanager
def _after_wake(answering: Any, act: Callable[[], Any]) -> Iterator[None]:
    """Act when the engine wakes to generate, but not when it wakes for a sync."""
    right = answering._engine.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            act()
        return right(*args, **kwargs)

    with patch.object(answering._engine, "generate", generate):
        yield


def _worker(answering: Any) -> Any:
    return answering._engine._llm.collective_rpc(lambda worker: worker)[0]


@contextmanager
def _stale_server(name: str, bench: Any, answering: Any) -> Iterator[None]:
    """The last server keeps its weights, loads the last adapter, or samples from the base."""
    servers = answering._fleet.servers  # none on other ranks than the first
    load_adapter, load_weights = RemoteServer.load_adapter, RemoteServer.load_weights
    old = answering._folder / f"{answering._name}-v{answering.version}"

    def adapter(self: RemoteServer, folder: Path, timeout_s: float) -> None:
        if self is not servers[-1] or name == "base":
            load_adapter(self, folder, timeout_s)
        else:  # the name of the new version with the tensors of the last one
            stale = shutil.copytree(old, folder.parent / "stale" / folder.name)
            load_adapter(self, stale, timeout_s)
        if self is servers[-1] and name == "base":
            self.model = self.base

    def weights(self: RemoteServer, folder: Path, timeout_s: float) -> None:
        if self is not servers[-1]:
            load_weights(self, folder, timeout_s)

    with (
        patch.object(RemoteServer, "load_adapter", adapter),
        patch.object(RemoteServer, "load_weights", weights),
    ):
        yield
