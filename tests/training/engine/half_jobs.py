"""Run by torchrun: `run_jobs.py`, with DeepSpeed patched to accept float16 on this CPU.

torch computes float16 on any CPU, slowly without AVX-512 FP16, and DeepSpeed refuses to. Only loss
scaling is tested, which does not depend on instructions. It begins at 2**24, at which these small
gradients overflow as those of a large model do at 2**16.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.settings import Settings


def main(paths: list[str]) -> None:
    """Train all jobs."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    from tasks.training import run
    from tests.training import run_jobs

    type(get_accelerator()).is_fp16_supported = lambda self: True
    own = run.deepspeed_config

    def overflowing(settings: Settings, world_size: int, **more: Any) -> dict[str, Any]:
        config = own(settings, world_size, **more)
        config["fp16"]["initial_scale_power"] = 24
        return config

    run.deepspeed_config = overflowing
    run_jobs.main(paths)


if __name__ == "__main__":
    main(sys.argv[1:])
