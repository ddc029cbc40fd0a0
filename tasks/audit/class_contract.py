"""Build a model's class with transformers on the meta device, in a child process.

Importing transformers is too slow for an audit of headers. Code that comes with a model is not run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.audit.known import first_architecture
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError, PlumblineError
from tasks.process.child import child_environment
from tasks.weights.plan.contracts import known_facts

_PROJECT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300.0
_MAX_TENSORS = 200_000
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


def can_be_built(source: Source) -> bool:
    """Return True if transformers can build the class and all tensors are known."""
    config, name = source.config(), first_architecture(source.config())
    served = source.kind is Kind.MODEL or name.endswith("ForSequenceClassification")
    plain = not config.get("auto_map") and not config.get("quantization_config")
    return served and plain and bool(name) and len(source.tensors) <= _MAX_TENSORS


def built_class(source: Source) -> Mapping[str, Any] | str:
    """Return the facts of the model's class as transformers builds it, or why it does not."""
    shapes_on_disk = {key: list(tensor.shape) for key, tensor in source.tensors.items()}
    reply = _answer(
        {
            "do": "model_facts",
            "config": str(source.folder.root),
            "dtype": "bfloat16",
            "disk": shapes_on_disk,
        }
    )
    facts: Mapping[str, Any] | str = reply["facts"] if "facts" in reply else str(reply["error"])
    return facts


def perform_apart(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Perform a request of `tasks.weights.execute.worker` without importing transformers here.

    Args:
        request: name of the request in `do`, and its arguments.

    Returns:
        The facts that the worker returns.

    Raises:
        ArtifactError: transformers cannot build a model from the configuration.
    """
    if request["do"] == "model_facts":
        disk = {name: tuple(shape) for name, shape in request["disk"].items()}
        known = known_facts(Path(request["config"]), request["dtype"], disk)
        if known is not None:
            return known.as_json()
    reply = _answer(request)
    if "error" in reply:
        raise ArtifactError(str(reply["error"]))
    facts: Mapping[str, Any] = reply["facts"]
    return facts


def _answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the child's reply: `facts` or `error`. The last few replies are cached."""
    folder, rest = request.get("config"), request
    config = ""
    if isinstance(folder, str):  # facts depend only on config.json and the shapes
        config = (Path(folder) / CONFIG).read_text()
        rest = {key: value for key, value in request.items() if key != "config"}
    key = hashlib.sha256(json.dumps([config, rest], sort_keys=True).encode()).hexdigest()
    if key not in _ANSWERS:
        reply = _run_child(request)
        if "error" in reply:
            return reply
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.pop(next(iter(_ANSWERS)))
        _ANSWERS[key] = reply
    return _ANSWERS[key]


_ANSWERS: dict[str, Mapping[str, Any]] = {}
_MOST_ANSWERS = 4
"""An audit of a merge needs the facts of source and base, which are often the same."""


def _run_child(request: Mapping[str, Any]) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "tasks.audit.class_contract"]
    try:
        finished = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            cwd=_PROJECT,
            env=child_environment(_QUIET),
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"transformers did not build the model within {_LIMIT_S:.0f} s"}
    lines = finished.stdout.splitlines()
    if finished.returncode or not lines:
        last = finished.stderr.strip().rpartition("\n")[2]
        return {"error": f"transformers could not build the model: {last}"}
    reply: dict[str, Any] = json.loads(lines[-1])
    return reply


def _child() -> None:
    """Perform the request on standard input, and print the reply as the last line."""
    from tasks.weights.execute.worker import perform

    reply: dict[str, Any]
    try:
        reply = {"facts": perform(json.load(sys.stdin))}
    except PlumblineError as error:
        reply = {"error": error.message}
    print("\n" + json.dumps(reply))  # on a line of its own, after any output of libraries


if __name__ == "__main__":
    _child()
