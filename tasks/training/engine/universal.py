"""Conversion for another number of ranks: `python -m ...engine.universal CHECKPOINT OUT`.

DeepSpeed's converter joins the partitions of all ranks into full tensors (fp32 weights, both
moments), from which any number of ranks can load. It runs in a process of its own, so that no rank
waits for it in a collective, and with as many workers as cores and memory allow.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from tasks.core.machine import available_memory
from tasks.training.engine.checkpoint import PARTITIONS, SHARDS


def convert(checkpoint: Path, out: Path) -> None:
    """Write each engine of a checkpoint in DeepSpeed's universal form, to a folder of its name."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    cores = len(os.sched_getaffinity(0))
    for engine in sorted(checkpoint.iterdir()):
        if not engine.is_dir() or engine.name == SHARDS:
            continue
        reading, joining = workers(engine, cores=cores, memory=available_memory() // 2)
        to_universal(
            SimpleNamespace(
                input_folder=str(engine),
                output_folder=str(out / engine.name),
                num_extract_workers=reading,
                num_merge_workers=joining,
                keep_temp_folder=False,
                strict=True,
                # Without tensor parallelism a checkpoint does not say how to join its parts.
                inject_missing_state=True,
            )
        )


def workers(engine: Path, *, cores: int, memory: int) -> tuple[int, int]:
    """Return how many processes split the files of ranks, and how many join tensors.

    A process of the first kind holds the file of one rank, one of the second kind the parts of one
    tensor and the tensor itself, in fp32.

    Args:
        engine: folder of an engine in a checkpoint.
        cores: number of cores.
        memory: bytes that all processes of a kind may take together.
    """
    files = [path.stat().st_size for path in engine.glob("*optim_states.pt")]
    trained = json.loads((engine.parent / PARTITIONS).read_text())["parameters"].values()
    tensor = 8 * max(math.prod(parameter["shape"]) for parameter in trained)
    reading = min(cores, len(files), memory // max(files))
    return max(1, reading), max(1, min(cores, memory // tensor))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
