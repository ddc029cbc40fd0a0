"""vLLM's pooling runner within a training rank: token ids in, a reward model's raw scores out.

It may live beside another engine in the same process (`rollouts.py`); like that one it uses the
ranks' own process group, and changes nothing of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import TrainingError
from tasks.process.block_unused_imports import compiles
from tasks.serving.vllm.guest import engine_class, undisturbed

PASSES = 4
"""Batches of tokens that the KV cache has room for. It lives for a pass: nothing is generated."""


@dataclass(frozen=True)
class Pooling:
    """The engine beside a rank.

    Attributes:
        model: folder of a `*ForSequenceClassification` with one label.
        max_model_len: longest text, in tokens.
        dtype: torch name.
        max_num_seqs: texts that it works on at once.
    """

    model: Path
    max_model_len: int
    dtype: str = "bfloat16"
    max_num_seqs: int = 256


@dataclass
class RewardEngine:
    """The engine.

    Attributes:
        how: what it is made of.
    """

    how: Pooling
    _llm: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Start it. Raises what vLLM raises."""
        with undisturbed():
            self._llm = _start(self.how)

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The head's output at the last token of each text, without an activation.

        Raises:
            TrainingError: vLLM gives other than one number for a text.
        """
        from vllm import PoolingParams

        inputs = [{"prompt_token_ids": list(map(int, text))} for text in texts]
        raw = PoolingParams(use_activation=False)
        with undisturbed():
            given = self._llm.classify(inputs, pooling_params=raw, use_tqdm=False)
        found = [list(one.outputs.probs) for one in given]
        if len(found) != len(texts) or any(len(one) != 1 for one in found):
            raise TrainingError(f"vLLM gave {len(found)} scores for {len(texts)} texts")
        return [float(one[0]) for one in found]

    def close(self) -> None:
        """End the engine and free its memory; the ranks' process group stays."""
        if self._llm is None:
            return
        with undisturbed():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()


def _start(how: Pooling) -> Any:
    at_once = max(2048, how.max_model_len)
    return engine_class()(
        model=str(how.model),
        runner="pooling",
        dtype=how.dtype,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=1,
        enforce_eager=not compiles(),
        max_model_len=how.max_model_len,
        max_num_seqs=how.max_num_seqs,
        max_num_batched_tokens=at_once,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        kv_cache_memory_bytes=PASSES * at_once * _kv_bytes(how.model),
        gpu_memory_utilization=0.01,  # checked on the way in; the number above is what counts
    )


def _kv_bytes(model: Path) -> int:
    """Bytes of keys and values of one token, in 16 bits; an upper bound where layers share them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    heads: int = config.num_attention_heads
    kept: int = getattr(config, "num_key_value_heads", None) or heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers: int = config.num_hidden_layers
    return 2 * 2 * layers * kept * width
