"""Rewards of responses: a reward model, a Python function, an HTTP endpoint, or their weighted sum.

    with open_rewards(reward, tokenizer=tokenizer, device=device, log=log, logs=logs) as rewards:
        total, parts = rewards.score(responses)

function   the user's function in a process of its own (`tasks/rl/user_code.py`), and exact match
model      a reward model in this process; `folder` reads its facts without loading it
http       an endpoint
sources    what they have in common

A source with weight 0 is recorded but does not count. A source that returns NaN, None or too few
numbers is a `RewardError` that shows the prompt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError
from tasks.process.output import Log
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.folder import folder_identity
from tasks.rl.rewards.function import EXACT_MATCH, ExactMatch, Function
from tasks.rl.rewards.sources import Source, Weighted
from tasks.rl.settings import Reward
from tasks.rl.user_code import ENVIRONMENT, FunctionReference
from tasks.training.job import REWARD_URL

if TYPE_CHECKING:
    import torch

__all__ = ["Rewards", "open_rewards", "sources_digest"]

FUNCTION_LOG = "reward_function.log"


class Rewards:
    """All reward sources of a run; none if an environment gives the rewards.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, sources: Sequence[Weighted]) -> None:
        self.sources = tuple(sources)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self, responses: Sequence[Response]
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Return the (S,) weighted sums, and the (S,) unweighted rewards by name of the source."""
        parts = {
            weighted.name: np.array(weighted.source(responses) if responses else [], np.float64)
            for weighted in self.sources
        }
        total: NDArray[np.float64] = np.zeros(len(responses), np.float64)
        for weighted in self.sources:
            total += weighted.weight * parts[weighted.name]
        return total, parts

    def close(self) -> None:
        """Close all sources: models, processes and connections."""
        with ExitStack() as stack:
            for weighted in self.sources:
                stack.callback(weighted.source.close)


def open_rewards(
    reward: Reward,
    *,
    tokenizer: Any,
    device: torch.device,
    log: Log,
    logs: Path,
    required: bool = True,
) -> Rewards:
    """Open all configured sources, so that errors show before the first rollout.

    Args:
        reward: section `reward`.
        tokenizer: the policy's.
        device: device of a reward model.
        log: gets messages, and the output of a reward function.
        logs: folder for complete outputs.
        required: False if there may be no source, as beside an environment.
    """
    sources: list[Weighted] = []
    with ExitStack() as opened:

        def add(name: str, weight: float, source: Source) -> None:
            opened.callback(source.close)
            sources.append(Weighted(name, weight, source))

        if reward.function == EXACT_MATCH:
            add("function", reward.function_weight, ExactMatch())
        elif reward.function is not None:
            function = Function(
                FunctionReference.of(reward.function),
                timeout_s=reward.timeout_s,
                log=log,
                log_path=logs / FUNCTION_LOG,
            )
            add("function", reward.function_weight, function)
        if reward.model is not None:
            from tasks.rl.rewards.model import RewardModel

            folder = Path(str(reward.model))
            model = RewardModel(folder, tokenizer, device, normalize=reward.normalize, log=log)
            add("model", reward.model_weight, model)
        if reward.url is not None:
            from tasks.rl.rewards.http import Endpoint

            url = os.environ.get(REWARD_URL, reward.url)
            add("url", reward.url_weight, Endpoint(url, reward, tokenizer, log))
        opened.pop_all()
    if required and not sources:
        raise ConfigError(
            "no reward source: reward.model, reward.function and reward.url are all unset",
            hint="reward.model=<folder>, reward.function=<path.py>:<name> or reward.url=<URL>",
        )
    return Rewards(sources)


def sources_digest(reward: Mapping[str, Any], environment: str | None = None) -> str:
    """Return the digest of the user's sources for the key of a stage; empty without any.

    They are the files of the function and the environment, and the folder of the reward model.
    """
    parts = []
    if environment:
        parts.append(FunctionReference.of(environment, ENVIRONMENT).digest())
    if reward["function"] and reward["function"] != EXACT_MATCH:
        parts.append(FunctionReference.of(reward["function"]).digest())
    if reward["model"]:
        parts += folder_identity(Path(reward["model"]).expanduser())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""
