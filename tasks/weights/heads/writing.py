"""Write a policy's value head to a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.execute.execute import Executed, execute
from tasks.weights.heads.detect import Found
from tasks.weights.heads.split import STEM, describe_head, head_sources, plan_value_head
from tasks.weights.plan.validate import validate

_SHOWN = 50


def write_value_head(detected: Found, out: Path) -> Executed:
    """Write `value_head.safetensors` and `value_head.json`.

    Args:
        detected: result of `detect` for a folder with a value head.
        out: empty folder, such as the staging folder of a stage.

    Raises:
        ContractError: no usable head, or NaN or infinity in it.
        ArtifactError: the files cannot be read or written.
    """
    sources = head_sources(detected)
    plan = plan_value_head(detected)
    validate(plan, sources, out=out)
    done = execute(plan, sources, out, stem=STEM, scan=True)
    _require_finite(done, detected.folder.root)
    _write_json(out / f"{STEM}.json", describe_head(detected))
    return done


def _require_finite(done: Executed, root: Path) -> None:
    findings = [f"{name}: {count} elements not finite" for name, count in done.nonfinite.items()]
    if findings:
        raise ContractError(f"{root}: {first_and_more(findings)}", details=findings[:_SHOWN])


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
