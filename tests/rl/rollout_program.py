"""Program for torchrun: policies of several kinds are synced, sampled, changed and synced again.

torchrun ... -m tests.rl.rollout_program JOB.json ...

Each job writes `rank-<n>.json` with its observations. A job with the objective `faults` breaks
something on purpose.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tasks.process.block_unused_imports import start_lean

start_lean()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tasks.process.exit_process import end_process  # noqa: E402
from tasks.rl.responses import Request  # noqa: E402
from tasks.rl.rollout.in_rank import VllmEngine  # noqa: E402
from tasks.rl.rollout.policy import MEMORY, PREFIX, Policy  # noqa: E402
from tasks.rl.rollout.servers import ServerEngine  # noqa: E402
from tasks.rl.settings import Online, Rollout  # noqa: E402
from tasks.serving.vllm.colocation import Generated  # noqa: E402
from tasks.training.engine.deepspeed_engine import Ranks, start_engine  # noqa: E402
from tasks.training.engine.partitions import whole  # noqa: E402
from tasks.training.engine.zero_config import deepspeed_config  # noqa: E402
from tasks.training.job import TrainJob  # noqa: E402
from tasks.training.model.build import load_model, load_tokenizer  # noqa: E402
from tasks.training.model.packed_model import model_of, restore_attention  # noqa: E402
from tests.rl.stale_faults import failure, stale_servers, stale_weights  # noqa: E402

END = 256
REPLIES = 6
"""Responses of the rank with the most; every rank runs as many passes to measure its own."""


def requests(rank: int) -> list[Request]:
    """Three prompts on rank 0, two on rank 1, of different lengths, with two responses each."""
    lengths = (5, 11, 8) if rank == 0 else (7, 3)
    return [
        Request(np.arange(20 + rank, 20 + rank + n, dtype=np.int32), 100 * rank + n, number)
        for n in lengths
        for number in range(2)
    ]


@dataclass
class Bench:
    """A policy in training, with measurements."""

    job: TrainJob
    ranks: Ranks
    engine: Any

    @classmethod
    def of(cls, job: TrainJob, ranks: Ranks) -> Bench:
        config = deepspeed_config(job.settings, ranks.world_size, gpu=ranks.gpu)
        model = load_model(job, ranks, config, tokenizer=load_tokenizer(job))
        return cls(job, ranks, start_engine(model, config, job.settings.optim))

    @property
    def rollout(self) -> Rollout:
        return Online.of(self.job.settings.online).rollout

    def answering(self) -> Any:
        probes = [request.ids.tolist() for request in requests(0)]
        kind = ServerEngine if self.rollout.engine == "server" else VllmEngine
        policy = Policy(self.engine, self.job, self.ranks)
        return closing(kind(policy, self.rollout, ends=(END,), probes=probes))

    def perturb(self, scale: float) -> None:
        """Move every trained tensor, equally on all ranks."""
        draw = torch.Generator().manual_seed(7)
        for parameter in Policy(self.engine, self.job, self.ranks).parameters.values():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            moved = torch.randn(shape, generator=draw) * scale
            with whole([parameter], writer=0), torch.no_grad():
                parameter.add_(moved.to(parameter.device, parameter.dtype))

    def differs(self, responses: Sequence[Generated]) -> float:
        """Mean absolute difference between the trainer's and the engine's log-probabilities.

        The trainer's are those of the model itself, one response at a time.
        """
        model, name = model_of(self.engine.module), self.job.settings.attn_implementation
        packed = model.config._attn_implementation
        restore_attention(model, name)
        self.engine.eval()
        prompts = [request.ids for request in requests(self.ranks.rank)]
        pairs = list(zip(prompts, responses, strict=True))
        differences = []
        for ids, response in [*pairs, *[pairs[-1]] * (REPLIES - len(pairs))]:
            both = torch.from_numpy(np.concatenate([ids, response.ids]).astype(np.int64))[None]
            with torch.no_grad():
                out = self.engine(input_ids=both.to(self.ranks.device), use_cache=False)
            logprobs = (out.logits[0].float() / self.rollout.temperature).log_softmax(-1).cpu()
            own = logprobs[len(ids) - 1 : -1].gather(1, both[0, len(ids) :, None])[:, 0]
            differences.append((own - torch.tensor(response.logprobs)).abs())
        self.engine.train()
        model.set_attn_implementation(packed)
        return float(torch.cat(differences).mean())


def watch(bench: Bench) -> dict[str, Any]:
    """Sync, sample, change the policy, plant faults, and record what happens."""
    mine = requests(bench.ranks.rank)
    bench.perturb(0.02)
    before = _process()
    with bench.answering() as answering:
        seen = follow(bench, answering, mine)
        serving = bench.rollout.engine == "server"
        seen |= (watch_servers if serving else watch_engine)(bench, answering, mine)
    after = _process()
    seen["undisturbed"] = [name for name in before if before[name] != after[name]]
    if serving:  # only these outlive the engine if something is wrong
        bench.ranks.barrier()  # the first rank is the one that removes the folder
        paths = [seen["folder"], *(f"/proc/{pid}" for pid in seen["supervisors"])]
        seen["left"] = [path for path in paths if Path(path).exists()]
    return seen


def follow(bench: Bench, answering: Any, mine: Sequence[Request]) -> dict[str, Any]:
    """Sync, sample, change the policy without a sync, sync again."""
    seen: dict[str, Any] = {"unpublished": failure(lambda: answering.generate(mine))}
    versions = [answering.sync_weights()]
    first = answering.generate(mine)
    seen["replies"] = _ids(first)
    seen["again"] = _ids(answering.generate(mine)) == _ids(first)
    nothing = answering.generate([] if bench.ranks.first else mine)
    seen["none"] = nothing == [] if bench.ranks.first else _ids(nothing) == _ids(first)
    seen["ended"] = all(g.ended == bool(g.ids[-1] == END) for g in first)
    seen["cut"] = all(END not in g.ids[:-1] for g in first)
    seen["differs"] = bench.differs(first)
    bench.perturb(0.02)
    seen["stale"] = failure(lambda: answering.generate(mine))
    seen["stale_differs"] = bench.differs(first)
    versions.append(answering.sync_weights())
    seen["differs_after"] = bench.differs(answering.generate(mine))
    return {**seen, "versions": versions}


def watch_engine(bench: Bench, answering: Any, mine: Sequence[Request]) -> dict[str, Any]:
    """Record what an engine in this process does after it was synced.

    It sleeps and wakes as on a GPU: on a CPU no memory is freed, but the calls of vLLM are real.
    """
    replies = _ids(answering.generate(mine))
    short = [replace(request, limit=2) for request in mine]  # as in later turns of an episode
    seen: dict[str, Any] = {
        "limited": _ids(answering.generate(short)) == [ids[:2] for ids in replies]
    }
    with patch("tasks.serving.vllm.rollouts.on_gpu", lambda: True):
        answering.sleep()
    seen["forgot"] = failure(lambda: answering.generate(mine))
    answering.sync_weights()
    seen["same after sleep"] = _ids(answering.generate(mine)) == replies
    if bench.ranks.device.type == "cpu":  # made in weights as vLLM packs them for a CPU
        seen["faults"] = stale_weights(bench, answering, mine)
    seen["left"] = sorted(path.name for path in MEMORY.glob(f"{PREFIX}{os.getpid()}*"))
    return seen


def watch_servers(bench: Bench, answering: Any, mine: Sequence[Request]) -> dict[str, Any]:
    """Record responses that are sampled ahead, faults of a server, and what servers leave."""
    before = answering.generate(mine)
    seen: dict[str, Any] = {"mismatch": answering.proof.mismatch}
    answering.start_ahead(mine)
    bench.perturb(0.02)
    seen["next version"] = answering.sync_weights()
    ahead = answering.generate(mine)
    seen["ahead"] = _ids(ahead) == _ids(before)
    seen["ahead of version"] = sorted({g.version for g in ahead})
    seen["faults"] = stale_servers(bench, answering)
    bench.ranks.barrier()  # the first rank is the one that removes the folder
    folder = answering._folder
    seen["published"] = len(list(folder.iterdir()))
    bench.ranks.barrier()
    seen["supervisors"] = [server.child.pid for server in answering._fleet.started]
    return {**seen, "folder": str(folder)}


def break_it(bench: Bench) -> dict[str, Any]:
    """Sync weights that must not be sampled from, with a LoRA policy below ZeRO-3."""
    mine, seen = requests(bench.ranks.rank), {}
    bench.perturb(0.02)
    policy = Policy(bench.engine, bench.job, bench.ranks)
    with bench.answering() as answering:
        answering.sync_weights()
        write = Policy.write

        def write_large(self: Policy, folder: Path | None) -> None:
            write(self, folder)
            if folder is not None:
                path = folder / "adapter_config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), "r": 4096}))

        with patch.object(Policy, "write", write_large):
            seen["refused"] = failure(answering.sync_weights)
        seen["after refusal"] = failure(lambda: answering.generate(mine))
        parameter = next(iter(policy.parameters.values()))
        whole = parameter.data
        parameter.data = whole[:, 1:]
        seen["contract"] = failure(answering.sync_weights)
        parameter.data = whole.clone()
        parameter.data[0, 0] = torch.nan
        seen["not finite"] = failure(answering.sync_weights)
        parameter.data = whole
    return seen


def _ids(responses: Sequence[Generated]) -> list[list[int]]:
    return [response.ids.tolist() for response in responses]


def _process() -> dict[str, Any]:
    """Process state that an engine must not change."""
    return {
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.set_num_threads),
        "cores": os.sched_getaffinity(0),
        "draws": (torch.get_rng_state().tolist(), str(np.random.get_state())),
        "dtype": torch.get_default_dtype(),
        "peers": torch.distributed.get_world_size(),
    }


def main() -> None:
    """Live through each job of the command line, and write what was seen beside it."""
    ranks = Ranks()
    for path in map(Path, sys.argv[1:]):
        job = TrainJob.read(path)
        try:
            bench = Bench.of(job, ranks)
            seen = (break_it if job.settings.objective == "faults" else watch)(bench)
            bench.engine.destroy()
        except Exception:
            seen = {"failure": traceback.format_exc()}
        (job.out / f"rank-{ranks.rank}.json").write_text(json.dumps(seen))
        if "failure" in seen:
            sys.exit(1)  # the other rank may wait for this one
        gc.collect()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
