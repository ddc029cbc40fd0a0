"""Child process: score a reward model with vLLM. `FOLDER OUT.json [MEAN STD]`; ids in `making`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tasks.process.block_unused_imports import start_lean


def main() -> None:
    """Score every text, one token sequence at a time."""
    start_lean(compiler=False)
    from vllm import LLM
    from vllm.config import PoolerConfig

    from tests.weights.heads.making import IDS, LENGTHS

    folder, out, *numbers = sys.argv[1:]
    mean, std = map(float, numbers) if numbers else (None, None)
    llm = LLM(
        folder,
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=32,
        pooler_config=PoolerConfig(logit_mean=mean, logit_sigma=std),
        disable_log_stats=True,
    )
    texts = [
        {"prompt_token_ids": ids[:length].tolist()}
        for ids, length in zip(IDS, LENGTHS, strict=True)
    ]
    scores = [output.outputs.probs for output in llm.classify(texts, use_tqdm=False)]
    Path(out).write_text(json.dumps(scores))


if __name__ == "__main__":
    main()
