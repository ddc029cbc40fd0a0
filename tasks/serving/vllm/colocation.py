"""Settings and results of an engine for rollouts. Imports neither torch nor vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from tasks.config.sections import Rollout

KEY_VARIABLE = "PLUMBLINE_API_KEY"
"""Variable with the API key of model servers. Keys of other services are never sent."""
DIRECT = {"all://127.0.0.1": None, "all://localhost": None}
"""`mounts` of an httpx client that asks servers of this machine past `HTTP_PROXY`."""
RANKS_OF_ADAPTERS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can allocate; an adapter uses the next larger one."""


@dataclass(frozen=True)
class Colocation:
    """Settings of a vLLM engine for rollouts, inside a training rank or in a server."""

    model: Path  # folder of the model that the engine starts with
    rollout: Rollout  # section `rollout`
    ends: tuple[int, ...] = ()  # ids of end tokens
    dtype: str = "bfloat16"  # torch name
    # largest rank of the adapters to sync; None: full weights are synced, and `model` is loaded
    # without weights
    adapter_rank: int | None = None
    trust_remote_code: bool = False  # as in transformers
    timeout_s: float = 900.0  # per call of `generate`

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and response together."""
        return self.rollout.max_prompt_len + self.rollout.max_new_tokens

    def options(self) -> dict[str, Any]:
        """Return the options that rollouts need, by the names of `vllm.LLM`, wherever it runs."""
        rollout = self.rollout
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "tensor_parallel_size": rollout.tensor_parallel,
            # log-probabilities at the temperature, and before top-p and top-k
            "logprobs_mode": "raw_logprobs" if rollout.cut else "processed_logprobs",
            "generation_config": "vllm",
        }
        if self.trust_remote_code:
            options["trust_remote_code"] = True
        if self.adapter_rank is None:
            # A tied head would keep its old packed copy on a CPU when new weights come, so the head
            # is untied and synced like every other tensor.
            return options | {"hf_overrides": {"tie_word_embeddings": False}}
        rank = room_for_rank(self.adapter_rank)
        return options | {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    def request(self, seed: int, limit: int, *, greedy: bool = False) -> dict[str, Any]:
        """Return the options of a request, by vLLM's names in Python and over HTTP.

        Each that changes sampling is set: a server takes others from the model's folder.
        """
        rollout, how = self.rollout, dict[str, Any](temperature=0.0, top_p=1.0, top_k=0)
        if not greedy:
            how = {"temperature": rollout.temperature, "top_p": rollout.top_p}
            how |= {"top_k": rollout.top_k, "seed": seed}
        return how | {
            "max_tokens": limit,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "ignore_eos": True,  # end tokens come from `ends`, not from the model folder
            "stop_token_ids": list(self.ends),
        }

    def overdue(self, missing: int, of: int) -> TrainingError:
        """Return the error for responses that are missing after `timeout_s`."""
        return TrainingError(
            f"rollouts: {missing} of {of} responses are missing after {self.timeout_s:g} s",
            hint="rollout.timeout_s=<more>, or shorter: rollout.max_new_tokens=<less>",
        )


@dataclass(frozen=True)
class Generated:
    """Token ids and log-probabilities of one sampled response."""

    ids: NDArray[np.int32]  # (n,) token ids, n >= 1, including the end token if there is one
    # (n,) float32, natural logarithm, at the temperature and before top-p and top-k
    logprobs: NDArray[np.float32]
    ended: bool  # True if an end token was sampled, False if the token limit cut it off
    version: int = 0  # of the policy that sampled it; 0 if the engine always has the current one


def room_for_rank(rank: int) -> int:
    """Return the adapter rank that vLLM has to allocate. Raises ConfigError if there is none."""
    for size in RANKS_OF_ADAPTERS:
        if rank <= size:
            return size
    raise ConfigError(f"peft.rank={rank}: vLLM serves adapters up to rank {RANKS_OF_ADAPTERS[-1]}")


def words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of `vllm serve`."""
    made: list[str] = []
    for name, value in options.items():
        made.append(f"--{name.replace('_', '-')}")
        if value is not True:
            made.append(value if isinstance(value, str) else json.dumps(value))
    return made


_ERROR = re.compile(r"\b(?!RuntimeError: Engine core)\w*(Error|Exception)\b: .+")
_MEMORY = re.compile(r"memory|kv.?cache", re.IGNORECASE)


def why_not_started(lines: Sequence[str]) -> tuple[str, str]:
    """Return vLLM's own first error in its last lines of output, and a hint.

    Its last line only says that the engine's process ended.
    """
    errors = (match[0] for line in lines if (match := _ERROR.search(line)))
    reason = next(errors, lines[-1] if lines else "no output")
    memory = "rollout.kv_cache_gib=<GiB> on a CPU, rollout.gpu_memory=<share> on a GPU"
    return reason[:400], f"more memory: {memory}" if _MEMORY.search(reason) else ""
