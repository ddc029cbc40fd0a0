"""Run one command such that no descendant of it outlives the parent process.

    python -I -S supervise.py FD command [argument ...]

`tasks/process/child.py` starts this file in its own session and keeps the write end of the pipe
whose read end is `FD`. The supervisor ends every descendant, first with SIGTERM, after five seconds
with SIGKILL, as soon as one of these happens:

- the pipe reaches its end: the parent has closed it or is dead, `kill -9` included;
- the supervisor gets a SIGTERM;
- the command ends: its remaining descendants get one second.

It is a *child subreaper* (`man 2 prctl`): it becomes the parent of every orphaned descendant, so it
also finds processes that have left the process group. torchrun's ranks have: each runs in its own
session, and killing torchrun's group would leave them training for ever.

It ends as the command does: with its exit status, or by the same signal. Linux only. It imports
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
GRACE_S, LEFTOVER_GRACE_S, KILL_WAIT_S = 5.0, 1.0, 2.5  # together less than ten seconds
CANNOT_START = 127


def descendants() -> list[int]:
    """Return the process ids of all living descendants, without zombies, the oldest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                stat = file.read()
        except OSError:  # the process has just ended
            continue
        state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    pids: list[int] = []
    todo = [os.getpid()]
    while todo:
        born = children.get(todo.pop(), [])
        pids += born
        todo += born
    return pids


class Command:
    """The supervised command and its descendants."""

    def __init__(self, argv: list[str]) -> None:
        # Python ignores SIGPIPE, and this file ignores SIGINT; the command should do neither.
        defaults = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM]
        self.pid = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=defaults)
        self.status: int | None = None

    def reap(self) -> None:
        """Wait for every zombie, and store the command's status."""
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
        """Send SIGTERM to every descendant, and SIGKILL to the rest after `grace_s` seconds."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
            signalled: set[int] = set()
            deadline = time.monotonic() + wait_s
            while (living := descendants()) and time.monotonic() < deadline:
                for pid in living:
                    # SIGTERM once, because a handler may be running; SIGKILL until it is gone.
                    if pid not in signalled or number == signal.SIGKILL:
                        signalled.add(pid)
                        signal_if_there(pid, number)
                time.sleep(0.02)
                self.reap()
        self.reap()

    def exit_like(self) -> None:
        """End as the command did, so that the parent reads its status from this process."""
        status = signal.SIGKILL if self.status is None else self.status
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core dump
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status))


def signal_if_there(pid: int, number: int) -> None:
    """Send a signal to a process; ignore one that has ended or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def watch(command: Command, *, pipe: int, wakeup: int, told_to_stop: list[int]) -> None:
    """Wait until the command has ended, the pipe of the parent has, or a SIGTERM has come.

    `wakeup` gets a byte with each signal; a SIGTERM makes `told_to_stop` non-empty.
    """
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
    """Supervise the command that follows `FD`; see the module docstring."""
    pipe, argv = int(arguments[0]), arguments[1:]
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
    command.end(GRACE_S if command.status is None else LEFTOVER_GRACE_S)
    command.exit_like()


if __name__ == "__main__":
    main(sys.argv[1:])
