"""Run by torchrun: a model in vLLM as it stands beside a training rank; greedy replies.

torchrun ... -m tests.serving.attention_program MODEL OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tasks.lean import start_lean

start_lean()

from tasks.serving.colocation import Colocation, Sampling  # noqa: E402
from tasks.serving.rollouts import Colocated  # noqa: E402
from tests.serving.test_cpu_attention import PROMPTS, REPLY  # noqa: E402


def by_the_kernel(model: Any) -> list[bool]:
    """Layer by layer."""
    from vllm.model_executor.layers.attention import Attention

    layers = (layer for layer in model.modules() if isinstance(layer, Attention))
    return [getattr(layer.impl, "_cache", None) is not None for layer in layers]


if __name__ == "__main__":
    folder, out = sys.argv[1:]
    how = Colocation(Path(folder), "float32", max_model_len=256, adapter_rank=8, kv_cache_gib=0.1)
    engine = Colocated(how, Sampling(max_new_tokens=REPLY))
    answers = engine.generate(PROMPTS, [0] * len(PROMPTS), greedy=True)
    told = {
        "layers": engine._llm.apply_model(by_the_kernel)[0],
        "ids": [one.ids.tolist() for one in answers],
        "logprobs": [one.logprobs.tolist() for one in answers],
    }
    Path(out).write_text(json.dumps(told))
    engine.close()
