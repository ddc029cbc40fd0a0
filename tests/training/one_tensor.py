"""Run by torchrun: under every ZeRO stage a model of which one tensor is trained, of 15 elements.

Rank 0 prints `stage N: BEFORE AFTER` of the loss.
"""

from __future__ import annotations

import torch
from torch import nn

from tasks.training.engine import Ranks, start_engine
from tasks.training.job import Batch, Settings, Zero
from tasks.training.zero_config import deepspeed_config


def main() -> None:
    """Three steps under each stage."""
    torch.set_num_threads(1)
    ranks = Ranks()
    for stage in range(4):
        settings = Settings(
            zero=Zero(stage),
            batch=Batch(micro_batch_size=1, global_batch_size=ranks.world_size),
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1)).bfloat16()
        model[1].requires_grad_(False)
        engine = start_engine(model, deepspeed_config(settings, ranks.world_size), settings.optim)
        given = torch.ones(1, 3, dtype=torch.bfloat16, device=ranks.device)
        losses = []
        for _ in range(3):
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.05
            loss = engine(given).float().square().sum()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if ranks.first:
            print(f"stage {stage}: {losses[0]:.4f} {losses[-1]:.4f}", flush=True)
        engine.destroy()
        ranks.barrier()
    ranks.leave()


if __name__ == "__main__":
    main()
