"""Program of one training rank whose engine compiles as on a GPU, or does not.

python -m tests.serving.compiled_program JOB.json yes|no

A CPU engine supports `enforce_eager=False` and inductor, but no CUDA graphs. The sampled tokens and
the number of graphs that dynamo made are written to `OUT/answer.json`.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from tasks.process import block_unused_imports as lean


def as_on_gpu(shipped: Any = lean.compiles) -> bool:
    """Make the decisions of a rank with a GPU."""
    with patch.object(lean, "on_gpu", lambda: True):
        return bool(shipped())


if sys.argv[-1] == "yes":
    lean.compiles = as_on_gpu

from tasks.training.entry import enter  # noqa: E402


def train_with(ranks: Any, job: Any, started: float) -> None:
    """Sample from the base."""
    from torch._dynamo.utils import counters

    from tasks.serving.vllm.colocation import Colocation, Sampling
    from tasks.serving.vllm.rollouts import Colocated

    how = Colocation(model=job.base, max_model_len=64, max_num_seqs=4, adapter_rank=8)
    engine = Colocated(how, Sampling(max_new_tokens=6, ends=(2,)))
    (answer,) = engine.generate([[1, 20, 30, 40]], [7], greedy=True)
    result = {
        "ids": answer.ids.tolist(),
        "logprobs": answer.logprobs.tolist(),
        "graphs": counters["stats"]["unique_graphs"],
    }
    (job.out / "answer.json").write_text(json.dumps(result))
    engine.close()


if __name__ == "__main__":
    enter(sys.argv[1], "tests.serving.compiled_program")
