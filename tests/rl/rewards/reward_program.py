"""Program of one rank for test_reward_model: scores of a reward model here and in vLLM."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from tasks.process.block_unused_imports import start_lean


def main() -> None:
    """Score with both, close both, and check that the ranks can still communicate."""
    start_lean()
    import torch
    import torch.distributed as dist

    from tasks.process.exit_process import end_process
    from tasks.rl.rewards import open_rewards
    from tasks.rl.settings import Reward
    from tests.rl.making import TOKENIZER, response

    dist.init_process_group("gloo")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank = dist.get_rank()
    to_score = [
        response(f"copy {'ab' * (i % 5)}", f"{i}" * (i % 7 + 1)) for i in range(rank, 48, 2)
    ]
    log = logging.getLogger("tests.rl")
    how = {"tokenizer": TOKENIZER, "device": torch.device("cpu"), "log": log, "logs": out}
    scores = {}
    with open_rewards(Reward(model=str(folder)), **how) as rewards:
        scores["process"] = rewards.score(to_score)[0].tolist()
    with open_rewards(Reward(model=str(folder), engine="vllm"), longest=100, **how) as rewards:
        scores["vllm"] = rewards.score(to_score)[0].tolist()
        scores["again"] = rewards.score(to_score)[0].tolist()
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks)
    (out / f"{rank}.json").write_text(json.dumps({**scores, "sum": float(ranks)}))
    dist.barrier()
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
