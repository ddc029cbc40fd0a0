"""Parse torchrun's output: the ranks that it is ending, and those that were killed.

If a rank fails, torchrun sends SIGTERM to the others, waits up to 30 s for those that do not react,
and then prints an epilogue of forty lines about itself. The failed rank's own lines come before it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

CLOSING_S = 8.0
"""Seconds from torchrun's SIGTERM to the other ranks until `launch` sends them SIGKILL."""

_AGENT = r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] "
_CLOSING = re.compile(_AGENT + r"Sending process (\d+) closing signal")
_VERDICT = re.compile(_AGENT + r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_FAILED_RANK = re.compile(r"^ +rank +: (\d+) \(local_rank: \d+\)")
_FAILED_STATUS = re.compile(r"^ +exitcode +: (-?\d+) \(pid: (\d+)\)")


def closing_pid(line: str) -> int | None:
    """Return the process id of the rank that torchrun ends according to this line, or None."""
    match = _CLOSING.search(line)
    return int(match[1]) if match else None


def is_verdict(line: str) -> bool:
    """Return True if this line starts torchrun's epilogue."""
    return _VERDICT.search(line) is not None


def ranks_own(lines: Iterable[str]) -> list[str]:
    """Return the output without torchrun's epilogue, and a line for each rank that was killed.

    A killed rank could not write a message itself. Ranks that torchrun has ended because another
    one failed get no line. The order of failures is left out, too: a rank that loses its peer may
    end before torchrun looks, and is then the first on torchrun's list.
    """
    kept: list[str] = []
    closed: set[int] = set()
    killed: dict[int, str] = {}
    rank, epilogue = "?", False
    for line in lines:
        if (pid := closing_pid(line)) is not None:
            closed.add(pid)
        elif (verdict := _VERDICT.search(line)) is not None:
            epilogue = True
            _note(killed, closed, rank=verdict[2], pid=int(verdict[3]), status=int(verdict[1]))
        elif not epilogue:
            if not re.search(_AGENT + "Unable to shutdown process", line):
                kept.append(line)
        elif (named := _FAILED_RANK.search(line)) is not None:
            rank = named[1]
        elif (status := _FAILED_STATUS.search(line)) is not None:
            _note(killed, closed, rank=rank, pid=int(status[2]), status=int(status[1]))
    return kept + list(killed.values())


def _note(killed: dict[int, str], closed: set[int], *, rank: str, pid: int, status: int) -> None:
    if status < 0 and pid not in closed:
        killed[pid] = f"rank {rank} (pid {pid}) was killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
