"""Interface and requests of all rollout engines, and the policies that they can sample.

Imports no torch: the preflight asks here whether vLLM can serve a policy. Conditions on the model,
the number of ranks and the machine are checked there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from tasks.core.finding import Finding
from tasks.rl.responses import Request
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Generated, Sampling
from tasks.training.job import Settings

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
_TABLES = (*_EMBEDDINGS, "lm_head", "embed_out")


class Engine(Protocol):
    """Samples responses. All ranks call every method together and in the same order."""

    @property
    def version(self) -> int:
        """Version of the policy that the engine samples from; 0: none."""
        ...

    def sync_weights(self) -> int:
        """Sync the policy's current weights to the engine, prove it, and return their version.

        Raises TrainingError for values that are not finite, or an engine that computes with other
        weights; ContractError for tensors that are not those of the configuration; ArtifactError if
        the engine rejects them.
        """
        ...

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, `samples` for each, in order; or greedily.

        A rank may have none. Raises TrainingError if the policy has changed since the last sync, or
        the engine failed or timed out.
        """
        ...

    def sleep(self) -> None:
        """Free the accelerator's memory until the next sync. The weights may be lost."""
        ...

    def close(self) -> None:
        """Shut the engine down and free everything."""
        ...


def goes_as_adapter(settings: Settings) -> bool:
    """Return True if vLLM gets the policy as an adapter, False if as merged weights.

    vLLM serves adapters of linear layers up to a rank, without whole modules or new rows.
    """
    peft = settings.peft
    if peft.kind == "none" or peft.use_dora or peft.modules_to_save or settings.new_tokens:
        return False
    return served_rank(settings) <= RANKS_OF_ADAPTERS[-1] and not _targets(settings, _TABLES)


def served_rank(settings: Settings) -> int:
    """Return the largest rank of the adapter."""
    peft = settings.peft
    return max([peft.rank, *(peft.rank_pattern or {}).values()])


def unservable(settings: Settings, rollout: Rollout) -> Iterator[Finding]:
    """Yield every reason why vLLM cannot sample from this policy."""
    if not Sampling(rollout.temperature, rollout.top_p, rollout.top_k).has_logprobs:
        yield Finding(
            "rollout.temperature",
            f"{rollout.temperature:g} with rollout.top_p={rollout.top_p:g} and "
            f"rollout.top_k={rollout.top_k}",
            "vLLM does not report log-probabilities at a temperature before top-p and top-k",
            "rollout.top_p=1 rollout.top_k=0, or rollout.temperature=1",
        )
    if settings.peft.use_dora and (named := _targets(settings, _EMBEDDINGS)):
        yield Finding(
            "peft.target_modules",
            f"{', '.join(named)} with peft.use_dora=true",
            "DoRA of an embedding cannot be merged for vLLM",
            "peft.use_dora=false or peft.target_modules=all-linear",
        )


def _targets(settings: Settings, names: tuple[str, ...]) -> list[str]:
    """Return the modules of these names that the adapter changes."""
    peft = settings.peft
    if peft.kind == "none" or isinstance(peft.target_modules, str):
        return []
    return [name for name in peft.target_modules if name in names]


class Single(NamedTuple):
    """One response to sample: its prompt, seed and token limit."""

    prompt: list[int]
    seed: int
    limit: int


def singles(requests: Iterable[Request], rollout: Rollout) -> list[Single]:
    """Return every response of some requests, each with a seed of its own."""
    made = []
    for request in requests:
        states = np.random.SeedSequence(request.seed).generate_state(request.samples, np.uint64)
        limit = rollout.max_new_tokens if request.limit is None else request.limit
        prompt = request.ids.tolist()
        made += [Single(prompt, int(state >> np.uint64(1)), limit) for state in states]
    return made


def own_responses(
    responses: Sequence[Generated], by_rank: Sequence[Sequence[Request]], place: int
) -> list[list[Generated]]:
    """Return the responses to the requests of one rank, from those of all ranks end to end."""
    before = sum(request.samples for requests in by_rank[:place] for request in requests)
    remaining = iter(responses[before:])
    return [list(islice(remaining, request.samples)) for request in by_rank[place]]
