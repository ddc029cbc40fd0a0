"""A checkpoint for another number of ranks: `python -m tasks.training.engine.universal ENGINE OUT`.

DeepSpeed's converter turns what each rank saved into whole tensors (fp32 weights, both moments), of
which any number of ranks can take their shares. It is a process of its own: no rank waits for it in
a collective.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

TAG = "universal"


def convert(engine: Path, out: Path) -> None:
    """Write DeepSpeed's checkpoint `engine` as a universal one, `out / TAG`."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    to_universal(
        SimpleNamespace(
            input_folder=str(engine),
            output_folder=str(out / TAG),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            # A checkpoint of no tensor-parallel training says nothing of how to join its parts.
            inject_missing_state=True,
        )
    )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
