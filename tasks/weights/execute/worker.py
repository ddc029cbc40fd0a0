"""Weight operations that need torch, transformers, peft or bitsandbytes, as JSON requests.

Importing these libraries takes 10 s, the work itself often milliseconds. So stages send requests
through a `Perform` function: `perform` answers in this process, and a warm child process that has
the libraries imported can answer the same requests instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.core.contract import Expected
from tasks.weights.execute.execute import execute
from tasks.weights.execute.outcome import Executed
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.plan.contracts import ModelFacts, expected_from_json
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tasks.weights.proof.recheck import Recomputed, recompute

Perform = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a request (`{"do": ..., ...}`); request and reply are plain JSON. May raise."""


def perform(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request in this process. Raises PlumblineError if the work fails."""
    return _HANDLERS[request["do"]](request)


def ask_facts(
    perform: Perform,
    config: Path,
    dtype: str,
    disk: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelFacts:
    """Request `contracts.model_facts`.

    Args:
        perform: answers the request.
        config: folder with the model's config.json.
        dtype: torch name of the dtype.
        disk: shape of every tensor on disk by key; None if unknown.
    """
    request: dict[str, Any] = {"do": "model_facts", "config": str(config), "dtype": dtype}
    if disk is not None:
        request["disk"] = {name: list(shape) for name, shape in disk.items()}
    return ModelFacts.from_json(perform(request))


def ask_adapter_contract(
    perform: Perform, base: Path, adapter_config: Path, dtype: str
) -> list[Expected]:
    """Request `contracts.adapter_contract`.

    Args:
        perform: answers the request.
        base: folder of the base model.
        adapter_config: path of adapter_config.json.
        dtype: dtype of the adapter's tensors (safetensors name).
    """
    request = {"base": str(base), "adapter_config": str(adapter_config), "dtype": dtype}
    reply = perform({"do": "adapter_contract", **request})
    return [expected_from_json(entry) for entry in reply["tensors"]]


def ask_reward_facts(
    perform: Perform, config: Mapping[str, Any], dtype: str, disk: Mapping[str, tuple[int, ...]]
) -> tuple[str, ModelFacts]:
    """Request `head_plans.reward_facts`.

    Args:
        perform: answers the request.
        config: fields of the model's config.json.
        dtype: torch name of the dtype.
        disk: shape of every tensor on disk by key.

    Returns:
        Name of the model class, and its facts.
    """
    shapes = {name: list(shape) for name, shape in disk.items()}
    reply = perform({"do": "reward_facts", "config": dict(config), "dtype": dtype, "disk": shapes})
    return str(reply["architecture"]), ModelFacts.from_json(reply["facts"])


def ask_quantization_config(perform: Perform, scheme: str, ignore: Sequence[str]) -> dict[str, Any]:
    """Request `quantize.library_config`."""
    request = {"do": "quantization_config", "scheme": scheme, "ignore": list(ignore)}
    return dict(perform(request))


def ask_execute(
    perform: Perform, plan: Plan, inputs: Mapping[str, SourceRef], out: Path
) -> Executed:
    """Request `validate` and then `execute`."""
    return Executed.from_json(perform({"do": "execute", **_work(plan, inputs, out)}))


def ask_recompute(
    perform: Perform, plan: Plan, inputs: Mapping[str, SourceRef], out: Path
) -> list[Recomputed]:
    """Request `recheck.recompute` for a merge that was written to `out`."""
    reply = perform({"do": "recompute", **_work(plan, inputs, out)})
    return [Recomputed(**entry) for entry in reply["tensors"]]


def _work(plan: Plan, inputs: Mapping[str, SourceRef], out: Path) -> dict[str, Any]:
    refs = {name: ref.as_json() for name, ref in inputs.items()}
    return {"plan": plan.as_json(), "inputs": refs, "out": str(out)}


def _parsed(request: Mapping[str, Any]) -> tuple[Plan, dict[str, Source], Path]:
    refs = {name: SourceRef.from_json(raw) for name, raw in request["inputs"].items()}
    return Plan.from_json(request["plan"]), open_sources(refs), Path(request["out"])


def _model_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.weights.plan.contracts import model_facts

    disk = request.get("disk")
    shapes = None if disk is None else {name: tuple(shape) for name, shape in disk.items()}
    return model_facts(Path(request["config"]), request["dtype"], shapes).as_json()


def _reward_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.weights.head_plans import reward_facts

    disk = {name: tuple(shape) for name, shape in request["disk"].items()}
    architecture, facts = reward_facts(request["config"], request["dtype"], disk)
    return {"architecture": architecture, "facts": facts.as_json()}


def _quantization_config(request: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.weights.quantized.quantize import library_config

    return library_config(request["scheme"], request["ignore"])


def _adapter_contract(request: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.weights.plan.contracts import adapter_contract

    expected = adapter_contract(
        Path(request["base"]), Path(request["adapter_config"]), request["dtype"]
    )
    return {"tensors": [asdict(tensor) for tensor in expected]}


def _execute(request: Mapping[str, Any]) -> dict[str, Any]:
    plan, sources, out = _parsed(request)
    validate(plan, sources)
    return execute(plan, sources, out).as_json()


def _recompute(request: Mapping[str, Any]) -> dict[str, Any]:
    plan, sources, out = _parsed(request)
    results = recompute(plan, sources, read_checkpoint(out))
    return {"tensors": [asdict(result) for result in results]}


_HANDLERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "model_facts": _model_facts,
    "adapter_contract": _adapter_contract,
    "quantization_config": _quantization_config,
    "reward_facts": _reward_facts,
    "execute": _execute,
    "recompute": _recompute,
}
