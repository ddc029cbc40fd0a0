"""Work that needs torch, transformers, peft or bitsandbytes, here or in a warm child process.

    facts = perform(model_facts, base, "bfloat16")

Importing these libraries takes 10 s, the work itself often milliseconds. So stages call functions
through a `Perform`: `perform` calls them in this process, `ReferenceScorer.perform` in a child
process that has the libraries imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

from tasks.weights.execute.execute import execute
from tasks.weights.execute.outcome import Executed
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import WEIGHTS, read_checkpoint
from tasks.weights.plan.contracts import ModelFacts, model_facts
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tasks.weights.proof.recheck import Recomputed, recompute

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Perform(Protocol):
    """Calls a module-level function; arguments and result can be pickled."""

    def __call__(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T: ...


def perform(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call the function in this process."""
    return function(*arguments)


def write(
    plan: Plan,
    inputs: Mapping[str, SourceRef],
    out: Path,
    stem: str = WEIGHTS,
    scan: bool = False,
) -> Executed:
    """Validate and execute a plan whose sources are opened here; `stem` and `scan` as there."""
    sources = open_sources(inputs)
    validate(plan, sources)
    return execute(plan, sources, out, stem=stem, scan=scan)


def recompute_written(plan: Plan, inputs: Mapping[str, SourceRef], out: Path) -> list[Recomputed]:
    """Recompute sampled rows of a merge that was written to `out`."""
    return recompute(plan, open_sources(inputs), read_checkpoint(out))


Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a JSON request for facts; the audit sends them to a child of its own."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a JSON request in this process: `{"do": name, "config": ..., "dtype", "disk"}`."""
    from tasks.weights.head_plans import reward_facts

    config, dtype = request["config"], request["dtype"]
    disk = {name: tuple(shape) for name, shape in request["disk"].items()}
    if request["do"] == model_facts.__name__:
        return model_facts(Path(config), dtype, disk).as_json()
    name, facts = reward_facts(config, dtype, disk)
    return {"architecture": name, "facts": facts.as_json()}


def by_requests(answer: Answer) -> Perform:
    """Return a `Perform` for facts, which sends them as JSON requests."""

    def perform(function: Callable[..., Any], *arguments: Any) -> Any:
        config, dtype, disk = arguments
        request = {
            "do": function.__name__,
            "config": str(config) if isinstance(config, Path) else dict(config),
            "dtype": dtype,
            "disk": {name: list(shape) for name, shape in disk.items()},
        }
        reply = answer(request)
        if function is model_facts:
            return ModelFacts.from_json(reply)
        return reply["architecture"], ModelFacts.from_json(reply["facts"])

    return cast("Perform", perform)
