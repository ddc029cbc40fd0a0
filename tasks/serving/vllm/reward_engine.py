"""vLLM's pooling runner inside a training rank: token ids in, a reward model's raw scores out.

It can run beside a rollout engine in the same process (`rollouts.py`). Both use the ranks' process
group and leave the rest of the process unchanged.
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
"""KV cache size in batches of tokens. An entry is used for one forward pass only."""


@dataclass(frozen=True)
class Pooling:
    """Settings of the reward engine.

    Attributes:
        model: folder of a `*ForSequenceClassification` with one label.
        max_model_len: maximum tokens of a text.
        dtype: torch name.
        max_num_seqs: texts scored at once.
    """

    model: Path
    max_model_len: int
    dtype: str = "bfloat16"
    max_num_seqs: int = 256


@dataclass
class RewardEngine:
    """A reward model in vLLM."""

    how: Pooling
    _llm: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Start the engine. Raises vLLM's own errors."""
        with undisturbed():
            self._llm = _start(self.how)

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the head's output at the last token of each text, without activation.

        Raises:
            TrainingError: vLLM did not return one number per text.
        """
        from vllm import PoolingParams

        inputs = [{"prompt_token_ids": list(map(int, text))} for text in texts]
        raw = PoolingParams(use_activation=False)
        with undisturbed():
            outputs = self._llm.classify(inputs, pooling_params=raw, use_tqdm=False)
        scores = [list(output.outputs.probs) for output in outputs]
        if len(scores) != len(texts) or any(len(score) != 1 for score in scores):
            raise TrainingError(f"vLLM gave {len(scores)} scores for {len(texts)} texts")
        return [float(score[0]) for score in scores]

    def close(self) -> None:
        """Shut the engine down and free its memory; the ranks' process group stays."""
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
        gpu_memory_utilization=0.01,  # only checked at start; the line above is used
    )


def _kv_bytes(model: Path) -> int:
    """Return the bytes of one token's keys and values in 16 bits, at most."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model, local_files_only=True, trust_remote_code=False
    ).get_text_config()
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers: int = config.num_hidden_layers
    return 2 * 2 * layers * kv_heads * width
