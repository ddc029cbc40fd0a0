"""The reference child: measures models with transformers, one fork per request.

    python -m tasks.serving.reference.child [--threads N]

It imports torch, transformers and peft once, emits "ready", and calls the functions that stdin
names (`tasks/evaluation/scoring.py` sends them). Arguments and results are pickled files in the
folder of a request: nothing that a model prints is ever unpickled. The parent process computes
nothing, since a fork would lose its worker threads. Each model lives in a fork of its own: its
memory is freed with the fork, and a crash is reported like any other result.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import pkgutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

from tasks.core.errors import PlumblineError
from tasks.core.events import emit, send_warnings
from tasks.process.block_unused_imports import on_gpu, start_lean
from tasks.serving import forks
from tasks.serving.reference.requests import ARGUMENTS, RESULT

TAIL_LINES = 20


def main() -> None:
    """Answer requests until stdin closes; with `--answer-to`, the single request in stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--answer-to", type=int, default=None, help="file descriptor")
    args = parser.parse_args()
    send_warnings()
    _warm_up()
    if args.answer_to is not None:
        _send(json.load(sys.stdin), args.threads, args.answer_to)
    emit("ready")
    for line in sys.stdin:
        if line.strip():
            emit("reply", **_in_fork(json.loads(line), args.threads))


def _warm_up() -> None:
    """Import everything that requests need, so that no fork has to."""
    forks.keep_cuda_unused()
    start_lean()
    if not on_gpu():  # with a GPU these two would initialise CUDA before the fork
        import bitsandbytes  # noqa: F401
        import peft  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import tasks.serving.reference.measure
    import tasks.serving.reference.rewards
    import tasks.weights.execute.worker  # noqa: F401


def _in_fork(request: dict[str, Any], threads: int | None) -> dict[str, Any]:
    receiver, sender = os.pipe()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.close(receiver)
            _child(request, threads, sender=sender, output=output)
        os.close(sender)
        with os.fdopen(receiver, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    sys.stdout.write(text)
    if raw:
        return dict(json.loads(raw))
    code = os.waitstatus_to_exitcode(status)
    return {"crash": code, "tail": text.splitlines()[-TAIL_LINES:]}


def _child(request: dict[str, Any], threads: int | None, *, sender: int, output: IO[bytes]) -> None:
    """Answer one request in a fork. Does not return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    if forks.cuda_is_lost():
        _answer_in_new_process(request, threads, sender)
    _send(request, threads, sender)


def _answer_in_new_process(request: dict[str, Any], threads: int | None, sender: int) -> NoReturn:
    with tempfile.TemporaryFile("w+") as request_file:
        json.dump(request, request_file)
        request_file.seek(0)
        os.dup2(request_file.fileno(), 0)
    os.set_inheritable(sender, True)
    thread_option = () if threads is None else ("--threads", str(threads))
    forks.start_again("tasks.serving.reference.child", "--answer-to", str(sender), *thread_option)


def _send(request: dict[str, Any], threads: int | None, sender: int) -> NoReturn:
    status = 1
    try:
        with os.fdopen(sender, "w") as pipe:
            json.dump(_answer(request, threads), pipe)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer(request: dict[str, Any], threads: int | None) -> dict[str, Any]:
    try:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(request["folder"])
        arguments = pickle.loads((folder / ARGUMENTS).read_bytes())
        result = pkgutil.resolve_name(request["function"])(*arguments)
        (folder / RESULT).write_bytes(pickle.dumps(result))
        return {"done": True}
    except PlumblineError as error:
        return {
            "failure": type(error).__name__,
            "message": error.message,
            "details": list(error.details),
            "hint": error.hint,
        }
    except Exception:  # the parent reports whatever happens here
        return {"crash": 1, "tail": traceback.format_exc().splitlines()[-TAIL_LINES:]}


if __name__ == "__main__":
    main()
