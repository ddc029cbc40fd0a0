"""The reference child: calls functions that need torch, transformers and peft, imported once.

    python -m tasks.serving.reference.child [THREADS]

It emits "ready", and calls the functions that stdin names (`tasks/evaluation/scoring.py` sends
them). Arguments and results are pickled files in the folder of a request: nothing that a model
prints is ever unpickled. A function that crashes ends this process; the next request starts
another.
"""

from __future__ import annotations

import gc
import json
import pickle
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from tasks.core.errors import PlumblineError
from tasks.core.events import emit, send_warnings
from tasks.process.torch_process import on_gpu, start_lean
from tasks.serving.reference.requests import ARGUMENTS, RESULT

TAIL_LINES = 20


def main(threads: str = "") -> None:
    """Answer requests until stdin closes."""
    send_warnings()
    import_libraries()
    import torch

    if threads:
        torch.set_num_threads(int(threads))
    emit("ready")
    for line in sys.stdin:
        emit("reply", **answer(json.loads(line)))
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()  # vLLM and the trainer need the memory


def import_libraries() -> None:
    """Import everything that requests need."""
    start_lean()
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import tasks.serving.reference.measure
    import tasks.serving.reference.rewards
    import tasks.weights.proof
    import tasks.weights.write  # noqa: F401


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Call a function, and return "done", its error, or the traceback of a crash."""
    folder = Path(request["folder"])
    try:
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
    main(*sys.argv[1:])
