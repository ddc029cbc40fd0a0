"""A training loop of one's own, with FSDP 1 or 2 on the CPU: `witness` on every rank."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.process.exit_process import end_process
from tasks.witness.plumbline_witness import witness


def main() -> None:
    """Shard the model in the folder named first, and record it in the folder named second."""
    base, out, version = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if version == "1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    witness(model, AutoTokenizer.from_pretrained(base), out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    end_process()
