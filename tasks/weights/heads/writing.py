"""A policy's value head written to a folder of its own; the policy itself is any other model.

`out` is an empty folder, as a stage's staging directory is. Nothing is written before all findings
are known.
"""

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


def write_value_head(found: Found, out: Path) -> Executed:
    """`value_head.safetensors` and `value_head.json`. Raises ContractError, ArtifactError."""
    sources = head_sources(found)
    plan = plan_value_head(found)
    validate(plan, sources, out=out)
    done = execute(plan, sources, out, stem=STEM, scan=True)
    _require_finite(done, found.folder.root)
    _write_json(out / f"{STEM}.json", describe_head(found))
    return done


def _require_finite(done: Executed, root: Path) -> None:
    found = [f"{name}: {count} elements not finite" for name, count in done.nonfinite.items()]
    if found:
        raise ContractError(f"{root}: {first_and_more(found)}", details=found[:_SHOWN])


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
