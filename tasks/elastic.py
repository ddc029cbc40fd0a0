"""What torchrun says about its ranks, as far as a parent has to understand it.

When a rank fails, torchrun asks the others to end, waits up to 30 s for those that do not listen,
and then prints forty lines about itself. The lines that matter, the failed rank's own, come before.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

CLOSING_S = 8.0
"""How long torchrun may take to end the other ranks before we do it."""

_AGENT = r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] "
_CLOSING = re.compile(_AGENT + r"Sending process \d+ closing signal")
_VERDICT = re.compile(_AGENT + r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


def is_closing(line: str) -> bool:
    """Whether torchrun has begun to end its ranks."""
    return _CLOSING.search(line) is not None


def is_verdict(line: str) -> bool:
    """Whether torchrun's epilogue begins: what follows is about itself."""
    return _VERDICT.search(line) is not None


def ranks_own(lines: Iterable[str]) -> list[str]:
    """Output without torchrun's epilogue.

    A rank that a signal killed could say nothing itself: a line about that is added.
    """
    kept: list[str] = []
    for line in lines:
        verdict = _VERDICT.search(line)
        if verdict is not None:
            status, rank, pid = (int(group) for group in verdict.groups())
            if status < 0:
                kept.append(f"rank {rank} (pid {pid}) was killed by {_signal_name(-status)}")
            return kept
        if not (is_closing(line) or re.search(_AGENT + "Unable to shutdown process", line)):
            kept.append(line)
    return kept


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
