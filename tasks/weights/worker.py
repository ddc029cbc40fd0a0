"""What of this room needs torch, transformers, peft or bitsandbytes: as requests and replies.

Importing them takes 10 s and gathering itself takes milliseconds. So stages ask for these things by
`Perform`: `perform` answers in this process; a warm child that has the imports behind it may answer
the same requests instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.contract import Expected
from tasks.weights.contracts import ModelFacts, expected_from_json
from tasks.weights.merge_plan import MergePlan
from tasks.weights.merge_run import MergeResult

Perform = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A request (`{"do": ..., ...}`) to its reply; both plain JSON. Raises what the work raises."""


def perform(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request here and now. Raises PlumblineError as the work does."""
    return _HANDLERS[request["do"]](request)


def ask_facts(perform: Perform, config: Path, dtype: str) -> ModelFacts:
    """`contracts.model_facts`, by whoever performs."""
    reply = perform({"do": "model_facts", "config": str(config), "dtype": dtype})
    return ModelFacts.from_json(reply)


def ask_adapter_contract(
    perform: Perform, base: Path, adapter_config: Path, dtype: str
) -> list[Expected]:
    """`contracts.adapter_contract`, by whoever performs."""
    reply = perform(
        {
            "do": "adapter_contract",
            "base": str(base),
            "adapter_config": str(adapter_config),
            "dtype": dtype,
        }
    )
    return [expected_from_json(entry) for entry in reply["tensors"]]


def ask_merge(
    perform: Perform,
    plan: MergePlan,
    *,
    base: Path,
    adapter: Path,
    out: Path,
    quantized: frozenset[str],
) -> MergeResult:
    """`merge_run.run_merge`, by whoever performs."""
    reply = perform(
        {
            "do": "merge",
            "plan": plan.as_json(),
            "base": str(base),
            "adapter": str(adapter),
            "out": str(out),
            "quantized": sorted(quantized),
        }
    )
    return MergeResult(**reply)


def _model_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.weights.contracts import model_facts

    return model_facts(Path(request["config"]), request["dtype"]).as_json()


def _adapter_contract(request: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from tasks.weights.contracts import adapter_contract

    expected = adapter_contract(
        Path(request["base"]), Path(request["adapter_config"]), request["dtype"]
    )
    return {"tensors": [asdict(one) for one in expected]}


def _merge(request: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.weights.merge_run import run_merge

    return run_merge(
        MergePlan.from_json(request["plan"]),
        base=Path(request["base"]),
        adapter=Path(request["adapter"]),
        out=Path(request["out"]),
        quantized=frozenset(request["quantized"]),
    ).as_json()


_HANDLERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "model_facts": _model_facts,
    "adapter_contract": _adapter_contract,
    "merge": _merge,
}
