"""Conversion for another number of ranks: `python -m ...engine.universal CHECKPOINT OUT`.

DeepSpeed's converter joins the partitions of all ranks into full tensors (fp32 weights, both
moments), from which any number of ranks can load. It runs in a process of its own, so that no rank
waits for it in a collective.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from tasks.training.engine.checkpoint import SHARDS


def convert(checkpoint: Path, out: Path) -> None:
    """Write each engine of a checkpoint in DeepSpeed's universal form, to a folder of its name."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    for engine in sorted(checkpoint.iterdir()):
        if not engine.is_dir() or engine.name == SHARDS:
            continue
        to_universal(
            SimpleNamespace(
                input_folder=str(engine),
                output_folder=str(out / engine.name),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                # Without tensor parallelism a checkpoint does not say how to join its parts.
                inject_missing_state=True,
            )
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
