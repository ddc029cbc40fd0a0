"""Write the critic's trained tensors, beside the policy's in a folder of their own.

    critic/
        shards/rank-*.safetensors    as the policy's
        partitions.json
        critic.json                  kind of critic, and meaning of its values

No later stage reads it: a value head in a served folder breaks vLLM.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.core.errors import TrainingError
from tasks.rl.experience.critic import CRITIC, Critic
from tasks.rl.settings import Loop
from tasks.training.engine.checkpoint import PARTITIONS, SHARDS
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.partitions import describe, not_finite, own_shares, write_shares
from tasks.training.job import TrainJob


def write_critic(critic: Critic, job: TrainJob, loop: Loop, ranks: Ranks) -> None:
    """Write this rank's shards of the critic; the first rank also writes their description.

    Args:
        critic: the critic.
        job: the training job; the critic goes to `job.out / "critic"`.
        loop: section `rl`.
        ranks: this process and its peers.

    Raises:
        TrainingError: a shard has values that are not finite.
    """
    folder = job.out / CRITIC
    with critic.active() as engine:
        shares = own_shares(engine.module, rank=ranks.rank, world_size=ranks.world_size)
        broken = not_finite(shares)
        if broken:
            raise TrainingError(
                f"after the last iteration {len(broken)} tensors of the critic are not finite, "
                f"first {broken[0]} on rank {ranks.rank}",
                details=broken[:20],
            )
        write_shares(shares, folder / SHARDS, rank=ranks.rank, world_size=ranks.world_size)
        if ranks.first:
            _describe(engine.module, job, loop)


def _describe(module: Any, job: TrainJob, loop: Loop) -> None:
    folder = job.out / CRITIC
    whole = job.settings.peft.kind == "none"
    partitions = describe(
        module,
        world_size=job.settings.world_size,
        zero_stage=job.settings.zero.stage,
        mode="full" if whole else "adapter",
    )
    document = {
        "kind": loop.critic,
        "base_digest": job.base_digest,
        "value": "expected sum of the rewards of the tokens that are still to come, before each",
        "gamma": loop.gamma,
    }
    for name, content in ((PARTITIONS, partitions), ("critic.json", document)):
        text = json.dumps(content, indent=1, sort_keys=True)
        (folder / name).write_text(text + "\n")
