"""What an engine beside a training rank is told, and what it answers. Knows no torch, no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError

RANKS_OF_ADAPTERS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM makes room for; an adapter takes the next one."""


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn.

    Attributes:
        temperature: of sampling, > 0.
        top_p: nucleus; 1: everything.
        top_k: most likely tokens sampled among; 0: all.
        max_new_tokens: longest reply.
        ends: ids of tokens that end a reply.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    ends: tuple[int, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether unlikely tokens are cut off."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def has_logprobs(self) -> bool:
        """Whether vLLM tells log-probabilities at the temperature and before the cut."""
        return not self.cut or self.temperature == 1

    @property
    def logprobs_mode(self) -> str:
        """What it calls them."""
        return "raw_logprobs" if self.cut else "processed_logprobs"


@dataclass(frozen=True)
class Colocation:
    """The engine beside a rank.

    Attributes:
        model: folder of the model it begins with.
        dtype: torch name.
        max_model_len: longest sequence, prompt and reply together.
        max_num_seqs: replies that it works on at once.
        tensor_parallel: ranks that share one engine.
        kv_cache_gib: of the KV cache on CPU.
        gpu_memory: share of a GPU's memory.
        adapter_rank: largest rank of the adapters it is given; None: it is given whole weights, and
            reads none from `model`.
        trust_remote_code: as in transformers.
        timeout_s: of one call of `generate`.
    """

    model: Path
    dtype: str = "bfloat16"
    max_model_len: int = 320
    max_num_seqs: int = 256
    tensor_parallel: int = 1
    kv_cache_gib: float = 1.0
    gpu_memory: float = 0.5
    adapter_rank: int | None = None
    trust_remote_code: bool = False
    timeout_s: float = 900.0


@dataclass(frozen=True)
class Answer:
    """One reply.

    Attributes:
        ids: (n,) token ids, the one that ends it included.
        logprobs: (n,) float32, natural logarithm, at the temperature and before any cut.
        ended: whether it ended by itself.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ended: bool


def room_for_rank(rank: int) -> int:
    """The size that vLLM is to make room for. Raises ConfigError when it has none."""
    for size in RANKS_OF_ADAPTERS:
        if rank <= size:
            return size
    raise ConfigError(
        f"peft.rank={rank}: vLLM serves adapters up to rank {RANKS_OF_ADAPTERS[-1]}",
        hint="rollout=transformers",
    )
