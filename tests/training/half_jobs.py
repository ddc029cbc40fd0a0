"""Run by torchrun: `run_jobs.py` where DeepSpeed takes this CPU for one that has float16.

torch computes in it on any CPU, slowly where there is no AVX-512 FP16, and DeepSpeed refuses to.
Which instructions a product is made of is nothing to its loss scaling, which is what is tested. It
begins at 2**24, where these small gradients overflow as a large model's do at 2**16.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.settings import Settings


def main(paths: list[str]) -> None:
    """Train all of them."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    from tasks.training import run
    from tests.training import run_jobs

    type(get_accelerator()).is_fp16_supported = lambda self: True
    own = run.deepspeed_config

    def overflowing(settings: Settings, world_size: int) -> dict[str, Any]:
        config = own(settings, world_size)
        config["fp16"]["initial_scale_power"] = 24
        return config

    run.deepspeed_config = overflowing
    run_jobs.main(paths)


if __name__ == "__main__":
    main(sys.argv[1:])
