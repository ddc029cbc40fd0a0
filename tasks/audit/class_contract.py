"""Build a model's class with transformers on the meta device, in a child process.

Importing transformers is too slow for an audit of headers. Code that comes with a model is not run.
"""

from __future__ import annotations

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
    """Return the child's reply: `facts` or `error`. The last few replies are kept.

    Facts depend only on config.json and the shapes: source and base of a merge often share them.
    """
    folder = request.get("config")
    config = (Path(folder) / CONFIG).read_text() if isinstance(folder, str) else ""
    rest = {key: value for key, value in request.items() if key != "config"}
    key = json.dumps([config, rest], sort_keys=True)
    reply = _ANSWERS.pop(key, None) or _run_child(request)
    if "error" not in reply:
        _ANSWERS[key] = reply
        if len(_ANSWERS) > _MOST_ANSWERS:
            _ANSWERS.pop(next(iter(_ANSWERS)))
    return reply


_ANSWERS: dict[str, Mapping[str, Any]] = {}
_MOST_ANSWERS = 4


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
    from tasks.weights.execute.worker import answer as perform

    reply: dict[str, Any]
    try:
        reply = {"facts": perform(json.load(sys.stdin))}
    except PlumblineError as error:
        reply = {"error": error.message}
    print("\n" + json.dumps(reply))  # on a line of its own, after any output of libraries


if __name__ == "__main__":
    _child()
