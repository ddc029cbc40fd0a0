"""Work that needs torch, transformers, peft or bitsandbytes, here or in a warm child process.

    facts = perform(model_facts, base, "bfloat16")

Importing these libraries takes 10 s, the work itself often milliseconds. So stages call functions
through a `Perform`: `perform` calls them in this process, `ReferenceScorer.perform` in a child
process that has the libraries imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

from tasks.weights.execute.execute import execute
from tasks.weights.execute.outcome import Executed
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.tensors import Sources
from tasks.weights.plan import Plan
from tasks.weights.validate import validate

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
    sources: Sources,
    out: Path,
    stem: str = WEIGHTS,
    scan: bool = False,
) -> Executed:
    """Validate and execute a plan; `stem` and `scan` as in `execute`."""
    validate(plan, sources)
    return execute(plan, sources, out, stem=stem, scan=scan)
