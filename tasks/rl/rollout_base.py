"""The base that vLLM samples from under QLoRA: what the 4 bits stand for, as plain weights.

bitsandbytes' rounding moves a small model's logits by a sixth; an engine on the original weights
would sample from another policy than the one that is trained.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.weights.adapters.changes import Changes
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.journal import JOURNAL
from tasks.weights.layout import with_output
from tasks.weights.nf4 import check_quantization
from tasks.weights.opening import SourceRef
from tasks.weights.reader import DTYPE_NAMES, read_json
from tasks.weights.stored4bit.plans import decoding
from tasks.weights.stored4bit.said import without_quantization
from tasks.weights.stored4bit.source import PackedCheckpoint, open_base
from tasks.weights.worker import Perform, ask_execute, ask_facts, perform

CONFIG = "config.json"
_BASE = "base"
_SHARD_BYTES = 5 * 10**9
_NOTHING = Changes({}, {}, {}, (), (), {}, ())
"""An adapter that changes nothing: what is left of a merge is the base as training holds it."""


def rollout_base(
    out: Path,
    base: Path,
    quantization: Mapping[str, Any],
    *,
    digest: str,
    dtype: str = "bfloat16",
    perform: Perform = perform,
) -> Path:
    """The folder that `rollout.engine=vllm` loads for a QLoRA policy; made when it is not there.

    Tensors are streamed; values are those that bitsandbytes gives a forward pass, bit for bit.

    Args:
        out: where such folders are kept; one a base and way to quantise it.
        base: HF folder that is trained, plain or stored in 4 bits.
        quantization: as `Peft.quantization()` says it.
        digest: of the base.
        dtype: torch name in which training holds what is not quantised.
        perform: who computes; this process, unless a warm one is given.

    Raises:
        ArtifactError: unreadable files, a full disk.
        ContractError: tensors that are not those of the model's class.
    """
    check_quantization(quantization)
    about = json.dumps({"base": digest, "dtype": dtype, **quantization}, sort_keys=True)
    folder = out / f"rollout-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
    if (folder / CONFIG).is_file():
        return folder
    work = folder.with_suffix(".part")
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    write_rollout_base(work, base, quantization, dtype=dtype, perform=perform)
    work.rename(folder)
    return folder


def write_rollout_base(
    work: Path, base: Path, quantization: Mapping[str, Any], *, dtype: str, perform: Perform
) -> None:
    """Fill an existing empty folder; arguments as of `rollout_base`."""
    facts = ask_facts(perform, base, dtype)
    with open_base(base) as weights:
        packed = isinstance(weights, PackedCheckpoint)
        asked = {**quantization, "loaded_dtype": dtype, "base": "dequantized"}
        how = MergeSettings() if packed else MergeSettings(
            quantization=asked, quantized=frozenset(facts.quantized)
        )  # fmt: skip
        plan = decoding(plan_merge(weights.tensors, facts, _NOTHING, {}, how), {_BASE: weights})
        plan = with_output(
            plan, dtype=DTYPE_NAMES[dtype], max_shard_bytes=_SHARD_BYTES, files=weights.files
        )
    ask_execute(perform, plan, {_BASE: SourceRef(base, "base")}, work)
    (work / JOURNAL).unlink()
    config = {**without_quantization(read_json(base / CONFIG)), "dtype": dtype}
    (work / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
