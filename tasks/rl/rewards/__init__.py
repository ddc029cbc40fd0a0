"""What replies are worth: a reward model, a Python function, an HTTP endpoint, and their sum.

    with open_rewards(reward, tokenizer=tokenizer, device=device, log=log, logs=logs) as rewards:
        total, parts = rewards.score(replies)

Each source that section `reward` names gives every reply a number; the total is the sum of them,
each times its weight. A source with weight 0 is recorded and counts nothing. Sources never give
NaN, None or too few numbers: that is a `RewardError` with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError
from tasks.process.output import Log
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards.exact import EXACT_MATCH, ExactMatch
from tasks.rl.rewards.function import Function
from tasks.rl.rewards.reference import FunctionReference
from tasks.rl.rewards.sources import Source, Weighted
from tasks.rl.settings import Reward

if TYPE_CHECKING:
    import torch

__all__ = ["Rewards", "open_rewards"]

FUNCTION_LOG = "reward_function.log"


class Rewards:
    """All sources of a run. Use it as a context manager, or `close` it.

    Args:
        sources: at least one.
    """

    def __init__(self, sources: Sequence[Weighted]) -> None:
        self.sources = tuple(sources)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def score(
        self, replies: Sequence[Reply]
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """What each reply is worth.

        Args:
            replies: S of them; none gives empty arrays.

        Returns:
            (S,) the weighted sums, and (S,) before weights by the name of each source.

        Raises:
            RewardError: naming the source and the prompt.
        """
        parts = {
            one.name: np.array(one.source(replies) if replies else [], np.float64)
            for one in self.sources
        }
        total: NDArray[np.float64] = np.zeros(len(replies), np.float64)
        for one in self.sources:
            total += one.weight * parts[one.name]
        return total, parts

    def close(self) -> None:
        """Let go of models, processes and connections."""
        with ExitStack() as stack:
            for one in self.sources:
                stack.callback(one.source.close)


def open_rewards(
    reward: Reward,
    *,
    tokenizer: Any,
    device: torch.device,
    log: Log,
    logs: Path,
    longest: int | None = None,
) -> Rewards:
    """Open every source that is named, so that what cannot work is known before the first rollout.

    Args:
        reward: the section.
        tokenizer: the policy's.
        device: where a reward model in this process computes.
        log: gets what happens on the way, and what a function prints.
        logs: folder for whole outputs.
        longest: tokens of the longest prompt with its longest reply, which a reward model in vLLM
            makes room for; None: its whole context.

    Raises:
        ConfigError: no source, or a function that is not there.
        ArtifactError: `reward.model` is no reward model, or cannot be loaded.
        RewardError: a function whose file cannot be imported.
    """
    sources: list[Weighted] = []
    with ExitStack() as opened:

        def add(name: str, weight: float, source: Source) -> None:
            opened.callback(source.close)
            sources.append(Weighted(name, weight, source))

        function = _function(reward, log, logs)
        if function is not None:
            add("function", reward.function_weight, function)
        if reward.model is not None:  # while the function's file is imported
            add("model", reward.model_weight, _model(reward, tokenizer, device, log, longest))
        if reward.url is not None:
            add("url", reward.url_weight, _endpoint(reward, tokenizer, log))
        if isinstance(function, Function):
            function.load()
        opened.pop_all()
    if not sources:
        raise ConfigError(
            "section reward names no source: nothing says what a reply is worth",
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
        reward.url,
        tokenizer=tokenizer,
        timeout_s=reward.timeout_s,
        retries=reward.retries,
        batch=reward.batch,
        log=log,
    )


def _model(
    reward: Reward, tokenizer: Any, device: torch.device, log: Log, longest: int | None
) -> Source:
    from tasks.rl.rewards.encoding import Encoding
    from tasks.rl.rewards.folder import RewardFolder
    from tasks.rl.rewards.model import InProcess, RewardModel, Scorer, in_vllm

    folder = RewardFolder.read(Path(str(reward.model)), normalize=reward.normalize)
    who = f"reward.model={folder.path}"
    encoding = Encoding.between(tokenizer, folder, who=who, log=log)
    scorer: Scorer
    if reward.engine == "process":
        scorer = InProcess(folder, device=device)
    elif reward.engine == "vllm":
        encoding = encoding.with_room(longest)
        scorer = in_vllm(folder, longest=encoding.limit)
    else:
        raise ConfigError(f"reward.engine={reward.engine} is none of process, vllm")
    normalisation = folder.normalisation if reward.normalize else None
    return RewardModel(who, encoding=encoding, scorer=scorer, normalisation=normalisation)
