"""Measure what a merge to nearest would keep of an adapter, before it is merged (values=true)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tasks.audit.catalogue.adapters import Adapters
from tasks.audit.class_contract import perform_apart
from tasks.audit.finding import Finding
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.files.dtype_conversion import rounded
from tasks.weights.proof.compare import comparable
from tasks.weights.proof.expected import Expected
from tasks.weights.proof.planning import planned

_KEPT = 0.9
"""Share below which a merge to nearest is reported."""


def check(source: Source) -> Iterator[Finding]:
    """Report an adapter of which rounding to nearest in bf16 loses a tenth or more."""
    base = source.base
    if not (source.values and source.is_adapter and base is not None and base.is_model):
        return
    try:
        made = planned(base.folder.root, source.folder.root, perform=perform_apart)
        update, kept = 0.0, {"BF16": 0.0, "F16": 0.0}
        for op in made.plan.ops:
            if not op.terms or comparable(op, made.sources):
                continue
            expected = Expected(op, made.sources)
            for first, end in expected.sampled_rows():
                block = expected.block(first, end)
                update += float(np.vdot(block.change, block.change))
                for dtype in kept:
                    gained = rounded(block.base + block.change, dtype) - block.base
                    kept[dtype] += float(np.vdot(gained, block.change))
    except PlumblineError:
        return  # adapter and base do not fit, which is a finding of other checks
    if update and kept["BF16"] < _KEPT * update:
        yield Adapters.ADAPTER_ROUNDS_AWAY.at(
            "",
            found=f"rounding the merged weights to nearest keeps {kept['BF16'] / update:.0%} of "
            f"the update in bfloat16, {kept['F16'] / update:.0%} in float16",
            expected="all of it",
        )
