"""rollout_base: write the dequantised base, which vLLM samples from while QLoRA trains on it.

The weights are bit-identical to those that training computes with. The rounding of bitsandbytes
changes a small model's logits by a sixth, so an engine on the original weights would sample from
another policy than the trained one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.folder import CONFIG, copy_side_file, model_files
from tasks.weights.lora import Changes
from tasks.weights.merge import BASE, plan_merge
from tasks.weights.model import Perform, model_facts
from tasks.weights.plan import with_output
from tasks.weights.quantized.config_fields import without_quantization
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.quantized.packed import read_base
from tasks.weights.write import write

_SHARD_BYTES = 5 * 10**9


def rollout_base(
    out: Path,
    *,
    base: Path,
    quantization: Mapping[str, Any],
    dtype: str,
    perform: Perform,
    log: Log,
) -> StageReport:
    """Fill `out` with the dequantised base, streamed, and its tokenizer.

    `quantization` is the value of `Peft.quantization()`; `dtype` that of tensors that training does
    not quantise. Raises ArtifactError for unreadable files or a full disk, ContractError if the
    tensors are not those of the model's class.
    """
    started = time.monotonic()
    check_quantization(quantization)
    facts = perform(model_facts, base, dtype)
    weights = read_base(base)
    dequantize = {**quantization, "loaded_dtype": dtype, "base": "dequantized"}
    plan = plan_merge(weights, facts, Changes(), quantization=dequantize)
    short = DTYPE_NAMES[dtype]
    plan = with_output(plan, weights, dtype=short, max_shard_bytes=_SHARD_BYTES, wide=facts.wide)
    perform(write, plan, {BASE: weights}, out)
    config = {**without_quantization(read_json(base / CONFIG)), "dtype": dtype}
    write_json(out / CONFIG, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (base / name).is_file():
            copy_side_file(base / name, out / name)
    _, tensors = model_files(out)
    seconds = time.monotonic() - started
    log.info("rollout_base: %d tensors dequantised in %.1f s", len(tensors), seconds)
    return StageReport("weights", metrics={"rollout_base/seconds": seconds})
