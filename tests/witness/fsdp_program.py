"""A training loop of one's own, with FSDP 2 on the CPU: `witness` on every rank."""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.process.exit_process import end_process
from tasks.witness.plumbline_witness import witness


def main() -> None:
    """Shard the model in the folder named first, and record it in the folder named second."""
    base, out = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    witness(model, AutoTokenizer.from_pretrained(base), out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    end_process()
