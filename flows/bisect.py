"""Find the module in which two models part, from their hidden states and their tensors.

    python flows/bisect.py a=DIR b=DIR                     the first module that differs, and why
    python flows/bisect.py a=BASE a_adapter=DIR b=MERGED   an unmerged adapter against its merge
    python flows/bisect.py a=DIR b=DIR out=report.json     as JSON, .xml as JUnit; out=- prints it
    python flows/bisect.py a=DIR b=DIR b_dtype=float32     load b in another dtype
    python flows/bisect.py a=DIR b=DIR profile=standard    a wider gate: below it nothing differs

a is the model that is right. Every module of b gets the inputs that it had in a, so a fault shows
in its own module and rounding does not add up. Needs memory for both models. Works from any
directory and writes nothing into a and b. Exit status: 0 no difference above noise and gate, 1 they
part, 2 they cannot be compared, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "bisect")

import logging
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.output import folder, inside, no_folder, show
from tasks.bisect.report import MERGE
from tasks.bisect.run import Options, bisect
from tasks.core.errors import ConfigError, Finding, StageProcessError, preflight
from tasks.core.terminal import typed
from tasks.delivery.reference import probe_texts
from tasks.evaluation.model_folder import computing_dtype_of
from tasks.evaluation.scoring import ModelRef
from tasks.weights.files.documents import read_json

ADAPTER_CONFIG = "adapter_config.json"
PROBES = 4
"""Texts that are measured on."""


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    bootstrap(composed.runs)
    settings = composed.settings
    preflight([*problems(settings)])
    options = Options(
        texts=probe_texts(None, PROBES),
        profile=settings["profile"],
        engine=settings["engine"],
        timeout_s=settings["timeout_s"],
    )
    log = logging.getLogger("plumbline.bisect")
    with tempfile.TemporaryDirectory() as work:
        log_path = Path(work) / "bisect.log"
        a, b = _model(settings, "a"), _model(settings, "b")
        try:
            report = bisect(a, b, options, log=log, log_path=log_path)
        except StageProcessError as error:  # its own exit status means that the models part
            reason, slow = f"they cannot be compared: {error.message}", error.reason == "timeout"
            hint = "timeout_s=<more seconds>" if slow else "the last lines say why"
            raise ConfigError(reason, details=error.details, hint=hint) from error
    show(report, settings["out"])
    return report.exit_status


def _model(settings: Mapping[str, Any], name: str) -> ModelRef:
    """Return one of the two models; an adapter's folder stands for its base with it."""
    path, adapter = folder(settings[name]), settings[f"{name}_adapter"]
    if adapter is None and (base := _base_of(path)) is not None:
        path, adapter = folder(base), str(path)
    return ModelRef(
        path,
        folder(adapter) if adapter else None,
        dtype=settings[f"{name}_dtype"] or computing_dtype_of(path),
        device=None if settings["device"] == "auto" else settings["device"],
    )


def _base_of(path: Path) -> str | None:
    """Return the base that an adapter's folder names; None for the folder of a model."""
    if (path / "config.json").is_file() or not (path / ADAPTER_CONFIG).is_file():
        return None
    return str(read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path"))


def problems(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the mistakes that this machine can tell."""
    for name in ("a", "b"):
        yield from _side_problems(settings, name)
    if settings["engine"] == "vllm" and (settings["b_adapter"] or _base_of(folder(settings["b"]))):
        yield Finding("engine", "vllm", "b is run without adapters", MERGE)
    yield from inside(settings, "a", "b")


def _side_problems(settings: Mapping[str, Any], name: str) -> Iterator[Finding]:
    text, adapter = settings[name], settings[f"{name}_adapter"]
    if missing := list(no_folder(name, text)):
        yield from missing
    elif (base := _base_of(folder(text))) is not None:
        if not folder(base).is_dir():
            override = f"{name}=<folder of the base> {typed(f'{name}_adapter', text)}"
            what = f"an adapter, and its base {base} is no folder here"
            yield Finding(name, text, what, override)
    elif not (folder(text) / "config.json").is_file():
        yield Finding(name, text, "no config.json in it", f"{name}=<Hugging Face folder>")
    if adapter and not (folder(adapter) / ADAPTER_CONFIG).is_file():
        override = f"{name}_adapter=<folder of the adapter>"
        yield Finding(f"{name}_adapter", adapter, f"no {ADAPTER_CONFIG} in it", override)
