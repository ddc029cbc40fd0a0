"""Run one command so that nothing of it outlives whoever asked for it.

    python -I -S supervise.py FD GRACE_S command [argument ...]

`tasks/process/child.py` starts this file in a session of its own and keeps the write end of the
pipe whose read end is `FD`. The supervisor ends every descendant, first with SIGTERM, after
`GRACE_S` seconds with SIGKILL, as soon as one of these happens:

- the pipe reaches its end: the parent closed it, or is gone, `kill -9` included;
- the supervisor gets a SIGTERM;
- the command ends: what it left behind gets a second to follow.

It is a *child subreaper* (`man 2 prctl`): a descendant whose parent dies is handed to it and not to
init, so it also finds those that left the process group. torchrun's ranks do: each runs in its own
session, and killing torchrun's group would leave them training for ever.

It ends as the command ended: with its exit status, or by the same signal. Linux only. Imports
little, because every child process of a run waits for it to start.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 1.0
KILL_WAIT_S = 2.5
CANNOT_START = 127


def descendants() -> list[int]:
    """Process ids of all living descendants, the eldest first; zombies do not count."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                stat = file.read()
        except OSError:  # it ended while we looked
            continue
        state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        born = children.get(todo.pop(), [])
        found += born
        todo += born
    return found


class Command:
    """The supervised command: its process, its wait status once it ended, and all that it left."""

    def __init__(self, argv: list[str]) -> None:
        # Python ignores SIGPIPE for itself and we ignore SIGINT; the command shall do neither.
        defaults = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM]
        self.pid = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=defaults)
        self.status: int | None = None

    def reap(self) -> None:
        """Bury every zombie we have, and remember the command's status."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def end(self, grace_s: float) -> None:
        """SIGTERM to every descendant, SIGKILL to those that are left after `grace_s` seconds."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
            told: set[int] = set()
            deadline = time.monotonic() + wait_s
            while (living := descendants()) and time.monotonic() < deadline:
                for pid in living:
                    # SIGTERM once each, because a handler may be at work; SIGKILL until it took.
                    if pid not in told or number == signal.SIGKILL:
                        told.add(pid)
                        signal_if_there(pid, number)
                time.sleep(0.02)
                self.reap()
        self.reap()

    def exit_like(self) -> None:
        """End as the command did, so that our parent reads its status from ours."""
        status = signal.SIGKILL if self.status is None else self.status
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status))


def signal_if_there(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended meanwhile, or may not be ours to end."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def watch(command: Command, *, pipe: int, wakeup: int, told_to_stop: list[int]) -> None:
    """Return when the command has ended or has to be ended."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while command.status is None and not told_to_stop:
        for fd, _ in poll.poll():
            if fd == wakeup:
                os.read(wakeup, 512)
            elif not os.read(pipe, 512):
                return
        command.reap()


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    pipe, grace_s, argv = int(arguments[0]), float(arguments[1]), arguments[2:]
    os.set_inheritable(pipe, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    told_to_stop: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides about Ctrl-C
    try:
        command = Command(argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", flush=True)
        os._exit(CANNOT_START)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # standard input is the command's alone

    watch(command, pipe=pipe, wakeup=wakeup, told_to_stop=told_to_stop)
    command.end(grace_s if command.status is None else LEFTOVER_GRACE_S)
    command.exit_like()


if __name__ == "__main__":
    main(sys.argv[1:])
