"""convert: `weights` -> `served`, a folder that vLLM and transformers load.

Tensors change their dtype and files if the settings say so; otherwise whole files are taken over:
read-only hard links to another artifact of the same store, copies of anything else. The tokenizer,
its template, the generation config and config.json are made consistent: the ids that end a text,
the padding id, the number of rows, the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, judge
from tasks.delivery.plan import Work
from tasks.evaluation.measuring import Measuring, stage_report, values_read
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.tensors import tensor_of
from tasks.weights.model import Model
from tasks.weights.plan import Executed, Plan, as_is, with_output
from tasks.weights.quantized.packed import open_model
from tasks.weights.write import write


def convert(
    out: Path,
    *,
    weights: Path,  # SOURCE, or the output of gather or merge
    planned: Callable[[], Work],
    dtype: str,  # torch name
    max_shard_bytes: int,  # largest tensor data of a file
    log: Log,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Write the tensors and all other files of a served folder, and check that they agree.

    If all tensors are byte-identical to the input's, its drift is carried over, and the notes say
    so. Raises ArtifactError for unreadable files or a full disk.
    """
    work = planned()
    plan, sources = work.plan, work.sources
    if not work.converts:
        source = open_model(weights)
        sources = {WEIGHTS: source}
        plan = with_output(
            as_is(source),
            source,
            dtype=DTYPE_NAMES[dtype],
            max_shard_bytes=max_shard_bytes,
            wide=work.facts.wide,
        )
    done = write(plan, sources, out)
    log.info("convert: %d tensors, %d files linked", len(plan.ops), len(done.linked))
    work.tokens.write(out, work, dtype)
    same = all(tensor_of(op.source, sources).hash == done.checksums[op.name] for op in plan.ops)
    checks = values_read(plan, done)
    if work.is_ours:
        checks = [*_contract(plan, done, work.facts), *(check for check in checks if not check.ok)]
    notes = {"linked": sorted(done.linked), "drift_carried_over": same}
    return stage_report(
        "served",
        out,
        plan,
        done,
        [*checks, *work.tokens.agreement(out, work, plan)],
        measuring=measuring,
        metrics={"linked": float(len(done.linked))},
        notes=notes if not work.merges else {**notes, "merge_base": work.choice.as_json()},
        earlier=weights if same else None,
    )


def _contract(plan: Plan, done: Executed, facts: Model) -> Iterator[Check]:
    """Yield a verdict on each tensor, by the class of the model.

    A tied tensor may be stored a second time; then both have to be equal.
    """
    ops = {op.name: op for op in plan.ops}
    yield from judge(facts.tensors, {k: op for k, op in ops.items() if k not in facts.tied})
    for name, stored in facts.tied.items():
        if name in ops and stored in ops:
            same = done.checksums[name] == done.checksums[stored]
            yield Check(name, f"tied: equal to {stored}", "equal" if same else "other", ok=same)
