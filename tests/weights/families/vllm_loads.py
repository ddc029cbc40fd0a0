"""Child process: load folders in vLLM, each in a fork, and write the scores.

    python -m tests.weights.families.vllm_loads FOLDER...

Writes FOLDER/vllm.json: log-prob of every token of `IDS` but the first, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from tasks.process.block_unused_imports import start_lean

IDS = tuple(range(3, 19))


def main() -> None:
    """Import vLLM once, then fork for each folder."""
    start_lean(compiler=False)
    from vllm import LLM  # noqa: F401

    for name in sys.argv[1:]:
        pid = os.fork()
        if pid == 0:
            _load(Path(name))
        os.waitpid(pid, 0)


def _load(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            max_num_batched_tokens=2048,
            max_num_seqs=2,
            enable_prefix_caching=False,
            disable_log_stats=True,
            limit_mm_per_prompt={"image": 0, "video": 0},
        )
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": list(IDS)}], params, use_tqdm=False)
        scores = [
            float(entry[token].logprob)
            for entry, token in zip(output.prompt_logprobs[1:], IDS[1:], strict=True)
        ]
        result: dict[str, object] = {"logprobs": scores}
    except Exception as error:  # the edge of a process: the test shows it
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / "vllm.json").write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
