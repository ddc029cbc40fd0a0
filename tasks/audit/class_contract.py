"""Names and shapes against the model's own class, for every family that transformers has.

Its class is built on the meta device by `tasks.weights.plan.contracts`, in a child process:
importing transformers takes longer than a look at headers may, so this is part of `values=true`.
Families that `headers.py` knows are not asked again. Code that a model brings along is not run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.audit.catalogue import headers as say
from tasks.audit.checks.headers import compare, knows
from tasks.audit.config_fields import first_architecture
from tasks.audit.finding import Finding
from tasks.audit.recognise import CONFIG, Kind
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError
from tasks.weights.families.counts import oversized
from tasks.weights.plan.contracts import known_facts

_PROJECT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300.0
_MAX_TENSORS = 200_000
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


def check(source: Source) -> Iterator[Finding]:
    """Ask transformers, where nobody else can tell and it can be asked."""
    if not (source.values and _can_be_asked(source)):
        return
    reply = _ask(source)
    if "error" in reply:
        yield say.CONTRACT_UNKNOWN.at(
            CONFIG,
            found=str(reply["error"]),
            expected=f"a class of {first_architecture(source.config())}",
        )
        return
    facts = reply["facts"]
    shapes = {one["name"]: tuple(one["shape"]) for one in facts["tensors"]}
    yield from compare(source, shapes, {*facts["tied"], *facts["unread"]})


def _can_be_asked(source: Source) -> bool:
    config, name = source.config(), first_architecture(source.config())
    served = source.kind is Kind.MODEL or name.endswith("ForSequenceClassification")
    plain = not config.get("auto_map") and not config.get("quantization_config")
    return (
        source.is_model
        and served
        and plain
        and bool(name)
        and source.weights.is_whole
        and not oversized(config)
        and len(source.tensors) <= _MAX_TENSORS
        and not knows(source)
    )


def _ask(source: Source) -> Mapping[str, Any]:
    """The facts of the model's class, or why there are none."""
    return _answer(
        {
            "do": "model_facts",
            "config": str(source.folder.root),
            "dtype": "bfloat16",
            "disk": {key: list(one.shape) for key, one in source.tensors.items()},
        }
    )


def perform_apart(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answer a request of `tasks.weights.execute.worker` without importing transformers here.

    Raises:
        ArtifactError: transformers makes no model of it.
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
    """A child's reply: `facts`, or `error` with the reason. The last few are remembered."""
    folder, rest = request.get("config"), request
    config = ""
    if isinstance(folder, str):  # a model's facts follow from its config.json and its shapes
        config = (Path(folder) / CONFIG).read_text()
        rest = {key: value for key, value in request.items() if key != "config"}
    key = hashlib.sha256(json.dumps([config, rest], sort_keys=True).encode()).hexdigest()
    if key not in _ANSWERS:
        reply = _asked(request)
        if "error" in reply:
            return reply
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.pop(next(iter(_ANSWERS)))
        _ANSWERS[key] = reply
    return _ANSWERS[key]


_ANSWERS: dict[str, Mapping[str, Any]] = {}
_MOST_ANSWERS = 4
"""An audit of a merge asks for source and base, which mostly are alike."""


def _asked(request: Mapping[str, Any]) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "tasks.audit.contract_child"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            cwd=_PROJECT,
            env={**os.environ, **_QUIET},
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"transformers made no model of it within {_LIMIT_S:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"transformers made no model of it: {last}"}
    reply: dict[str, Any] = json.loads(lines[-1])
    return reply
