"""Build a model's class with transformers on the meta device, in a child process.

Importing transformers is too slow for an audit of headers.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

from tasks.audit.source import CONFIG
from tasks.core.errors import ArtifactError, PlumblineError
from tasks.process.child import child_environment
from tasks.weights.model import known_facts, model_facts

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_PROJECT = Path(__file__).resolve().parents[2]
_CALL, _RESULT = "call.pickle", "result.pickle"
_LIMIT_S = 300.0
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
_RESULTS: dict[bytes, Any] = {}
"""Results by function, config.json and shapes: source and base often share them."""


def perform_apart(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call a function of `tasks.weights` about a model class, without importing transformers here.

    Raises:
        ArtifactError: transformers cannot build a model from the configuration.
    """
    call: tuple[Any, ...] = arguments
    if function.__name__ == model_facts.__name__ and (known := known_facts(*call)) is not None:
        return cast("T", known)
    folder, *rest = call
    config = (folder / CONFIG).read_bytes() if isinstance(folder, Path) else folder
    key = pickle.dumps((function.__name__, config, rest))
    if key not in _RESULTS:
        _RESULTS[key] = _in_child(function, call)
    return cast("T", _RESULTS[key])


def _in_child(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function in a child; what libraries print there is never unpickled."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _CALL).write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", "tasks.audit.class_contract", folder]
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, cwd=_PROJECT, check=False,
                env=child_environment(_QUIET), timeout=_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            text = f"transformers did not build the model within {_LIMIT_S:.0f} s"
            raise ArtifactError(text) from error
        if finished.returncode:
            last = finished.stderr.strip().rpartition("\n")[2]
            raise ArtifactError(f"transformers could not build the model: {last}")
        result, message = pickle.loads((Path(folder) / _RESULT).read_bytes())
    if message:
        raise ArtifactError(message)
    return result


def _child(folder: Path) -> None:
    """Make the call in a folder, and write its result there."""
    function, arguments = pickle.loads((folder / _CALL).read_bytes())
    result, message = None, ""
    try:
        result = function(*arguments)
    except PlumblineError as error:
        message = error.message
    (folder / _RESULT).write_bytes(pickle.dumps((result, message)))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
