"""Run by torchrun: PEFT's own save under ZeRO-3, beside our partitions of the same model."""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.partitions import own_partitions, write_partitions
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.model.build import load_model, load_tokenizer

job = TrainJob.read(Path(sys.argv[1]))
ranks = Ranks()
config = deepspeed_config(job.settings, ranks.world_size)
engine = start_engine(
    load_model(job, ranks, config, tokenizer=load_tokenizer(job)), config, job.settings.optim
)
if ranks.first:
    engine.module.save_pretrained(job.out / "naive")
partitions = own_partitions(engine.module, rank=ranks.rank, world_size=ranks.world_size)
write_partitions(partitions, job.out / "shards", rank=ranks.rank, world_size=ranks.world_size)
ranks.barrier()
ranks.leave()
end_process()
