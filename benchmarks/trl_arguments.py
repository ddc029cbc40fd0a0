"""What every TRL trainer is told here: compute as the others do, and write nothing."""

from __future__ import annotations

from typing import Any


def common(dtype: str) -> dict[str, Any]:
    """Arguments of a TRL configuration class, for weights of that torch dtype."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "model_init_kwargs": {"dtype": dtype},
        "use_cpu": not gpu,
        "bf16": dtype == "bfloat16" and gpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
