"""Conversion for another number of ranks: `python -m tasks.training.engine.universal ENGINE OUT`.

DeepSpeed's converter joins the partitions of all ranks into full tensors (fp32 weights, both
moments), from which any number of ranks can load. It runs in a process of its own, so that no rank
waits for it in a collective.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

TAG = "universal"


def convert(engine: Path, out: Path) -> None:
    """Write the DeepSpeed checkpoint `engine` as a universal checkpoint, `out / TAG`."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    to_universal(
        SimpleNamespace(
            input_folder=str(engine),
            output_folder=str(out / TAG),
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
