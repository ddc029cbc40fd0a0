"""Run by torchrun: tokenise both splits and print the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tasks.core.errors import DataError
from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.model.build import load_tokenizer
from tasks.training.tokens.data import load_split

job = TrainJob.read(Path(sys.argv[1]))
ranks = Ranks()
found = {"error": ""}
for split in ("train", "heldout"):
    try:
        load_split(job, split, roles=("text",), tokenizer=load_tokenizer(job), ranks=ranks)
    except DataError as error:
        found["error"] = error.message
(job.data / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
ranks.barrier()
ranks.leave()
end_process()
