"""Rewards of responses: a reward model, a Python function, an HTTP endpoint, or their weighted sum.

    with open_rewards(reward, tokenizer=tokenizer, device=device, log=log, logs=logs) as rewards:
        total, parts = rewards.score(responses)

A source with weight 0 is recorded but does not count. A source that returns NaN, None or too few
numbers is a `RewardError` that shows the prompt.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError
from tasks.process.output import Log
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.exact import EXACT_MATCH, ExactMatch
from tasks.rl.rewards.function import Function
from tasks.rl.rewards.reference import FunctionReference
from tasks.rl.rewards.sources import Source, Weighted
from tasks.rl.settings import Reward
from tasks.training.job import REWARD_URL

if TYPE_CHECKING:
    import torch

__all__ = ["Rewards", "open_rewards"]

FUNCTION_LOG = "reward_function.log"


class Rewards:
    """All reward sources of a run. Use it as a context manager, or call `close`.

    Args:
        sources: at least one, unless an environment gives the rewards.
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
        """Return the rewards of responses.

        Args:
            responses: S responses; may be empty.

        Returns:
            (S,) weighted sums, and (S,) unweighted rewards by name of the source.

        Raises:
            RewardError: names the source and the prompt.
        """
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
        device: device of a reward model in this process.
        log: gets messages, and the output of a reward function.
        logs: folder for complete outputs.
        required: False if there may be no source, as beside an environment.

    Raises:
        ConfigError: no source, or the function does not exist.
        ArtifactError: `reward.model` is not a reward model or cannot be loaded.
        RewardError: the function's file cannot be imported.
    """
    sources: list[Weighted] = []
    with ExitStack() as opened:

        def add(name: str, weight: float, source: Source) -> None:
            opened.callback(source.close)
            sources.append(Weighted(name, weight, source))

        function = _function(reward, log, logs)
        if function is not None:
            add("function", reward.function_weight, function)
        if reward.model is not None:  # loads while the child imports the function's file
            add("model", reward.model_weight, _model(reward, tokenizer, device, log))
        if reward.url is not None:
            add("url", reward.url_weight, _endpoint(reward, tokenizer, log))
        if isinstance(function, Function):
            function.load()
        opened.pop_all()
    if required and not sources:
        raise ConfigError(
            "no reward source: reward.model, reward.function and reward.url are all unset",
            hint="reward.model=<folder>, reward.function=<path.py>:<name> or reward.url=<URL>",
        )
    return Rewards(sources)


def _function(reward: Reward, log: Log, logs: Path) -> ExactMatch | Function | None:
    if reward.function is None:
        return None
    if reward.function == EXACT_MATCH:
        return ExactMatch()
    reference = FunctionReference.of(reward.function)
    function = Function(
        reference, timeout_s=reward.timeout_s, log=log, log_path=logs / FUNCTION_LOG
    )
    function.start()
    return function


def _endpoint(reward: Reward, tokenizer: Any, log: Log) -> Source:
    from tasks.rl.rewards.http import Endpoint

    assert reward.url is not None
    return Endpoint(
        os.environ.get(REWARD_URL, reward.url),
        tokenizer=tokenizer,
        timeout_s=reward.timeout_s,
        retries=reward.retries,
        batch=reward.batch,
        log=log,
    )


def _model(reward: Reward, tokenizer: Any, device: torch.device, log: Log) -> Source:
    from tasks.rl.rewards.encoding import Encoding
    from tasks.rl.rewards.folder import RewardFolder
    from tasks.rl.rewards.model import InProcess, RewardModel

    folder = RewardFolder.read(Path(str(reward.model)), normalize=reward.normalize)
    label = f"reward.model={folder.path}"
    encoding = Encoding.between(tokenizer, folder, label=label, log=log)
    scorer = InProcess(folder, device=device)
    normalisation = folder.normalisation if reward.normalize else None
    return RewardModel(label, encoding=encoding, scorer=scorer, normalisation=normalisation)
