"""Work that needs torch, transformers, peft or bitsandbytes, here or in a warm child process.

    facts = perform(model_facts, base, "bfloat16")

Importing these libraries takes 10 s, the work itself often milliseconds. So stages call functions
through a `Perform`: `perform` calls them in this process, `ReferenceScorer.perform` in a child
process that has the libraries imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Perform(Protocol):
    """Calls a module-level function; arguments and result can be pickled."""

    def __call__(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T: ...


def perform(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call the function in this process."""
    return function(*arguments)
