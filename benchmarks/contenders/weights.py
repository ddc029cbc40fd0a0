"""The contenders of `make bench-weights`, each in its own process.

    python -m benchmarks.contenders.weights merge BASE ADAPTER OUT

Our jobs run the stages without drift measurement: open, plan, validate, execute, publish (with a
manifest, flushed to disk). Other tools run as their documentation says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SHARD = 5 * 10**9
"""Default of `convert.max_shard_size`; the synthetic bases have no larger file."""


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Merge a PEFT adapter into its base, our way."""
    from tasks.weights.lora import read_adapter, require_values

    plan, sources = _planned(base, adapter)
    require_values(read_adapter(adapter))
    _make("weights", plan, sources, out)


def _planned(base: Path, adapter: Path) -> tuple[Any, dict[str, Any]]:
    """Return the plan of a merge as the stage makes it, and the inputs by name."""
    from tasks.weights.files.reader import read_checkpoint
    from tasks.weights.lora import changes, read_adapter
    from tasks.weights.merge import plan_merge
    from tasks.weights.model import model_facts
    from tasks.weights.plan import with_output

    lora = read_adapter(adapter)
    facts = model_facts(base)
    changed = changes(lora, facts)
    weights = read_checkpoint(base)
    made = plan_merge(weights, facts, changed)
    made = with_output(made, weights, dtype=None, max_shard_bytes=SHARD)
    return made, {"base": weights, "adapter": lora.tensors}


def convert(weights: Path, out: Path) -> None:
    """Convert a model that already has the wanted dtype and files, our way."""
    from tasks.weights.files.reader import read_checkpoint
    from tasks.weights.plan import as_is, with_output

    source = read_checkpoint(weights)
    plan = with_output(as_is(source), source, dtype="BF16", max_shard_bytes=SHARD)
    _make("served", plan, {"model": source}, out)


def gather(shards: Path, out: Path) -> None:
    """Gather an adapter from the partitions of all ranks, our way."""
    from tasks.weights.files.names import rename_all
    from tasks.weights.files.reader import ADAPTER
    from tasks.weights.plan import Op, Plan
    from tasks.weights.shards import read_partitions

    parts = read_partitions(shards)
    keys = rename_all(parts.tensors, adapter=True)
    ops = tuple(
        Op(key, parts.tensors[name].shape, parts.dtype, f"shards:{name}", parts.dtype)
        for name, key in keys.items()
    )
    _make("adapter", Plan(ops), {"shards": parts.tensors}, out, stem=ADAPTER, scan=True)


def plan(base: Path, adapter: Path) -> None:
    """Plan and validate a merge, and lay out its files, without writing any."""
    from tasks.weights.plan import validate
    from tasks.weights.write import lay_out

    made, sources = _planned(base, adapter)
    validate(made, sources)
    files = lay_out(made, sources)
    _say({"tensors": len(made.ops), "files": len(files), "bytes": made.nbytes})


def peft_merge(base: Path, adapter: Path, out: Path) -> None:
    """Merge an adapter as peft's documentation says: `merge_and_unload`, `save_pretrained`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(out)


def _make(kind: str, plan: Any, sources: Mapping[str, Any], out: Path, **settings: Any) -> None:
    from tasks.pipeline.artifact import Origin, publish, staging
    from tasks.weights.write import write

    with staging(out) as work:
        done = write(plan, sources, work, **settings)
        publish(work, out, Origin(kind, "bench", out.name), done.hashes)
    _say({"written": done.written, "linked": len(done.linked)})


def _say(document: Mapping[str, Any]) -> None:
    print(json.dumps(document))


JOBS: dict[str, Callable[..., None]] = {
    "merge": merge,
    "convert": convert,
    "gather": gather,
    "plan": plan,
    "peft-merge": peft_merge,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*map(Path, sys.argv[2:]))
