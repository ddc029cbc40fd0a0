"""Program for ranks: policies of several kinds are synced, sampled, changed and synced again.

python -m tests.ranks 2 tests.rl.rollout_program JOB.json ...

It asserts on every rank; a rank that fails writes `failure-<n>` beside its job. A job with the
objective `faults` breaks something on purpose.
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

from tasks.process.torch_process import start_lean

start_lean()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tasks.process.torch_process import end_process  # noqa: E402
from tasks.rl.responses import Request  # noqa: E402
from tasks.rl.rollout.engine import VllmEngine  # noqa: E402
from tasks.rl.rollout.policy import MEMORY, PREFIX, Policy  # noqa: E402
from tasks.rl.rollout.servers import ServerEngine  # noqa: E402
from tasks.rl.settings import Online, Rollout  # noqa: E402
from tasks.serving.vllm.colocation import Generated  # noqa: E402
from tasks.training.engine.deepspeed_engine import (  # noqa: E402
    Ranks,
    start_engine,
    whole,
)
from tasks.training.engine.zero_config import deepspeed_config  # noqa: E402
from tasks.training.job import TrainJob  # noqa: E402
from tasks.training.model.build import load_model, load_tokenizer  # noqa: E402
from tasks.training.model.packed_model import model_of, restore_attention  # noqa: E402
from tests.rl.stale_faults import failure, require_noticed  # noqa: E402

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

    def perturb(self, scale: float = 0.02) -> None:
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


def watch(bench: Bench) -> None:
    """Sync, sample, change the policy, and plant faults."""
    mine = requests(bench.ranks.rank)
    bench.perturb()
    before = _process()
    with bench.answering() as answering:
        follow(bench, answering, mine)
        if bench.rollout.engine == "server":
            left = watch_servers(bench, answering, mine)
        else:
            watch_engine(bench, answering, mine)
            left = list(MEMORY.glob(f"{PREFIX}{os.getpid()}*"))
    after = _process()
    assert [name for name in before if before[name] != after[name]] == []
    bench.ranks.barrier()  # the first rank is the one that removes the folder
    assert [path for path in left if path.exists()] == []


def follow(bench: Bench, answering: Any, mine: Sequence[Request]) -> None:
    """Sync, sample, change the policy without a sync, sync again."""
    assert failure(lambda: answering.generate(mine)), "nothing is synced"
    assert answering.sync_weights() == 1
    first = answering.generate(mine)
    everyone = [tuple(ids) for of_rank in bench.ranks.all_objects(_ids(first)) for ids in of_rank]
    assert len(everyone) == len(set(everyone)) == 10, "every response has its own seed"
    assert _ids(answering.generate(mine)) == _ids(first), "same weights, prompts and seeds"
    nothing = answering.generate([] if bench.ranks.first else mine)
    assert _ids(nothing) == ([] if bench.ranks.first else _ids(first)), "one has nothing to do"
    assert all(g.ended == bool(g.ids[-1] == END) and END not in g.ids[:-1] for g in first)
    assert bench.differs(first) <= 0.01  # nats; the bar of the mismatch
    bench.perturb()
    assert failure(lambda: answering.generate(mine)), "the policy has changed"
    assert bench.differs(first) > 0.05, "the change was one that shows"
    assert answering.sync_weights() == 2
    # Both compute in bf16, and each is as far from fp32 as from the other: that grows with the
    # weights, to 0.012 after four such changes, whatever was handed over.
    assert bench.differs(answering.generate(mine)) <= 0.01


def watch_engine(bench: Bench, answering: Any, mine: Sequence[Request]) -> None:
    """Let an engine in this process sleep and wake as on a GPU, and plant faults.

    On a CPU no memory is freed, but the calls of vLLM are real.
    """
    replies = _ids(answering.generate(mine))
    short = [replace(request, limit=2) for request in mine]  # as in later turns of an episode
    assert _ids(answering.generate(short)) == [ids[:2] for ids in replies]
    with patch("tasks.serving.vllm.rollouts.on_gpu", lambda: True):
        answering.sleep()
    forgot = "version 0" in failure(lambda: answering.generate(mine))
    assert forgot != answering.policy.as_adapter, "full weights are lost in a sleep"
    answering.sync_weights()
    assert _ids(answering.generate(mine)) == replies
    # Made in weights as vLLM packs them for a CPU.
    if bench.ranks.device.type == "cpu" and bench.job.out.name in ("lora", "full"):
        require_noticed(bench, answering, mine)


def watch_servers(bench: Bench, answering: Any, mine: Sequence[Request]) -> list[Path]:
    """Sample ahead, and plant faults of a server; return what has to be gone afterwards."""
    before = answering.generate(mine)
    assert answering.proof.mismatch < 0.01
    answering.start_ahead(mine)
    bench.perturb()
    assert answering.sync_weights() == 3
    ahead = answering.generate(mine)
    assert _ids(ahead) == _ids(before), "sampled ahead, by the version before"
    assert {g.version for g in ahead} == {2}
    require_noticed(bench, answering, mine)
    bench.ranks.barrier()
    assert len(list(answering._folder.iterdir())) == 1, "only the last version"
    bench.ranks.barrier()
    servers = [Path(f"/proc/{server.child.pid}") for server in answering._fleet.started]
    return [answering._folder, *servers]


def break_it(bench: Bench) -> None:
    """Sync weights that must not be sampled from, with a LoRA policy below ZeRO-3."""
    mine = requests(bench.ranks.rank)
    bench.perturb()
    write = Policy.write

    def write_large(self: Policy, folder: Path | None) -> None:
        write(self, folder)
        if folder is not None:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "r": 4096}))

    with bench.answering() as answering:
        answering.sync_weights()
        with patch.object(Policy, "write", write_large):
            assert "version 2" in failure(answering.sync_weights)
        assert failure(lambda: answering.generate(mine)), "never from the base instead"
        parameter = next(iter(answering.policy.parameters.values()))
        whole = parameter.data
        parameter.data = whole[:, 1:]
        assert "lora_A.weight" in failure(answering.sync_weights), "not the contract's shape"
        parameter.data = whole.clone()
        parameter.data[0, 0] = torch.nan
        assert "lora_A" in failure(answering.sync_weights), "not finite"
        parameter.data = whole


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
    """Live through each job of the command line."""
    ranks = Ranks()
    for path in map(Path, sys.argv[1:]):
        job = TrainJob.read(path)
        try:
            bench = Bench.of(job, ranks)
            (break_it if job.settings.objective == "faults" else watch)(bench)
            bench.engine.destroy()
        except Exception:
            (job.out / f"failure-{ranks.rank}").write_text(traceback.format_exc())
            sys.exit(1)  # the other rank may wait for this one
        gc.collect()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
