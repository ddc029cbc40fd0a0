"""Write what a run knows about its served model into a model card (`README.md`).

Same artifacts and settings give the same bytes: no time of day, no id of a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.orchestration.summary import last_metrics, stage_entry
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import StageResult
from tasks.release.gate import LM_EVAL, NUMBERS, interval, measured
from tasks.release.model_card import card, hub_id, license_of
from tasks.serving.llama_cpp import serve_line

_NOT_OF_THE_MODEL = (
    "paths.", "tracking.", "register.", "timeouts.", "force=", "out=", "overwrite=",
)  # fmt: skip
"""Overrides that do not change the model."""
_ROLES = ("base", "dataset", "shards", "adapter", "weights")
"""Kinds of artifacts whose digests the card lists."""


def chain_card(
    results: Sequence[StageResult], served: Artifact, settings: Mapping[str, Any], command: str
) -> str:
    """Return the card of a model that was trained by a command; "" if that is unknown."""
    model, data, train = settings["model"], settings["data"], settings["train"]
    names = [data["name"]] if data["kind"] == "hub" else []
    names += [each["path"] for each in data["sources"] if each["kind"] == "hub"]
    peft = settings["peft"]["kind"]
    header = {
        "base_model": hub_id(model["path"]),
        "datasets": [name for name in names if name],
        "library_name": "transformers",
        "license": license_of(model["path"]),
        "tags": ["plumbline", "vllm", train["objective"], *([peft] if peft != "none" else [])],
    }
    base = Path(model["path"]).name if model["path"] else f"{model['kind']} model"
    steps = [int(r.metrics["steps"]) for r in results if "steps" in r.metrics]
    rows = [int(r.metrics["data/train_rows"]) for r in results if "data/train_rows" in r.metrics]
    trained = [
        f"- method: `{train['objective']}`, {'all weights' if peft == 'none' else f'`{peft}`'}",
        *(f"- optimizer steps: {number}" for number in steps[-1:]),
        *(f"- training rows: {number}" for number in rows[-1:]),
        *(f"- `{word}`" for word in _changed(command)),
    ]
    return card(header, f"{base} after {train['objective']}", _sections(results, served, trained))


def delivery_card(
    results: Sequence[StageResult], served: Artifact, source: Path, base: Path | None, command: str
) -> str:
    """Return the card of a checkpoint that was made elsewhere; arguments as for `chain_card`."""
    header = {
        "library_name": "transformers",
        "license": license_of(str(base or source)),
        "tags": ["plumbline", "vllm"],
    }
    made = [
        f"- made elsewhere, as `{source.name}`",
        *([f"- base: `{base.name}`"] if base is not None else []),
        *(f"- `{word}`" for word in _changed(command)),
    ]
    return card(header, source.name, _sections(results, served, made))


def _sections(
    results: Sequence[StageResult], served: Artifact, trained: Sequence[str]
) -> dict[str, Sequence[str]]:
    return {
        "Training": trained,
        "Evaluation": list(_evaluation(results)),
        "Proof": list(_proof(results, served)),
        "Serve": [
            "```bash",
            serve_line(served.path).replace(str(served.path), "<this folder>"),
            "```",
        ],
        "Verify": [
            "The manifest lists the hash of every tensor and file. A running server is compared",
            "with this folder by:",
            "",
            "```bash",
            "plumbline verify url=http://localhost:8000 source=<this folder>",
            "```",
        ],
    }


def _changed(command: str) -> list[str]:
    """Return the overrides of a command that change the model."""
    words = [word for word in shlex.split(command) if "=" in word]
    # A path names a folder of this machine, which means nothing elsewhere.
    return [w for w in words if not w.startswith(_NOT_OF_THE_MODEL) and "=/" not in w]


def _evaluation(results: Sequence[StageResult]) -> Iterator[str]:
    """Yield a table of the evaluation of the last step, before and after training."""
    metrics = last_metrics(results)
    numbers = measured(metrics, {})
    names = [n for n in NUMBERS if n.startswith(("eval.", "quantize.")) and n in numbers]
    names += [n for n in numbers if n.startswith(LM_EVAL)]
    of_the_run = ("_s", ".samples", ".left_out")
    names = [n for n in names if not n.endswith(of_the_run)]
    if names:
        yield "| measure | before | after | 95 % interval |"
        yield "|---|---|---|---|"
    for name in names:
        before = numbers.get(f"base:{name}")
        ends = interval(name, numbers[name], metrics)
        shown = "" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"
        first = "" if before is None else f"{before:.4g}"
        yield f"| `{name}` | {first} | {numbers[name]:.4g} | {shown} |"


def _proof(results: Sequence[StageResult], served: Artifact) -> Iterator[str]:
    """Yield the drift of every hand-off with its limit, and the digests."""
    entries = [stage_entry(result) for result in results]
    if compared := [(entry["name"], entry["handoff"]) for entry in entries if entry["handoff"]]:
        yield "| hand-off | measure | unit | drift | limit |"
        yield "|---|---|---|---|---|"
        for name, drift in compared:
            numbers = f"{drift['value']:.2g} | {drift['limit']:.2g}"
            yield f"| {name} | {drift['measure']} | {drift['unit']} | {numbers} |"
        yield ""
    yield f"- digest of this model: `{served.digest}`"
    for result in results:
        if result.artifact.kind in _ROLES:
            yield f"- {result.name}: `{result.artifact.digest}`"
