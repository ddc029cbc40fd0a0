"""The vLLM child: serves folders one after the other, measures each, and says what came out.

    python -m tasks.serving.vllm_child job.json [job.json ...]

The only importer of vllm. That import takes longer than all the rest, so it happens once, and every
job runs in a fork of its own: an engine that is loaded afresh, never one into which other weights
were poured. It works in token ids throughout: prompts in, tokens out; texts are the parent's
business. `job.Job` is what it reads, `result.json` and `fingerprint.fp` what it leaves.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tasks.ending import end_process
from tasks.fingerprint import Fingerprint
from tasks.lean import start_lean
from tasks.serving.job import Job

NUMBERS_AT_ONCE = 4_000_000
"""Log-probabilities asked for in one call: vLLM hands them out as Python objects (~100 B each)."""


def main() -> None:
    """Do the jobs named on the command line, each in a fork."""
    _import_vllm()
    for path in sys.argv[1:]:
        pid = os.fork()
        if pid == 0:
            _child(Path(path))
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"vLLM ended with status {os.waitstatus_to_exitcode(status)} on {path}")


def _import_vllm() -> None:
    """All imports and no arithmetic: a process that has worker threads must not fork."""
    import torch

    # On a CPU compiling costs more than it gives.
    start_lean(compiler=torch.accelerator.is_available())
    from vllm import LLM  # noqa: F401


def _child(path: Path) -> NoReturn:
    """The whole life of a fork."""
    try:
        _serve(Job.load(path))
    except Exception:  # the edge of a process: the parent shows the last lines
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _serve(job: Job) -> None:
    out = Path(job.out)
    began = time.perf_counter()
    llm = _engine(job)
    result: dict[str, Any] = {"load_s": time.perf_counter() - began}
    if job.rewards:
        result["rewards"] = rewards(llm, job.prompts)
        (out / "result.json").write_text(json.dumps(result))
        return
    if job.reference is not None:
        reference = Fingerprint.load(Path(job.reference))
        fingerprint(llm, reference).save(out / "fingerprint.fp")
    result["rendered_differently"] = _rendered_differently(llm, job)
    result["served"] = generate(llm, job)
    if job.temperature is not None:
        result["drawn"] = generate(llm, job, temperature=job.temperature)
    (out / "result.json").write_text(json.dumps(result))


def _engine(job: Job) -> Any:
    import torch
    from vllm import LLM

    return LLM(
        model=job.served,
        dtype=job.dtype,
        seed=job.seed,
        enforce_eager=not torch.accelerator.is_available(),
        max_model_len=job.max_model_len,
        tensor_parallel_size=job.tensor_parallel,
        max_num_batched_tokens=max(2048, job.max_model_len),
        max_num_seqs=64,
        max_logprobs=-1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        runner="pooling" if job.rewards else "generate",
    )


def rewards(llm: Any, prompts: Sequence[Sequence[int]]) -> list[float]:
    """What a reward model gives for each prompt: the head's output, as its config.json asks for."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [float(one.outputs.probs[0]) for one in llm.classify(inputs, use_tqdm=False)]


def fingerprint(llm: Any, reference: Fingerprint) -> Fingerprint:
    """Score the reference's probes at the reference's ids.

    vLLM's CPU runner gives prompt log-probabilities of its own choice of tokens only, so all of
    them are asked for, few enough probes at a time, and those of `reference.ids` are kept.
    """
    from vllm import SamplingParams

    width = llm.llm_engine.model_config.get_vocab_size()
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    rows: list[NDArray[np.float32]] = []
    for probes in _portions(reference.probes, width):
        inputs = [{"prompt_token_ids": list(probe)} for probe in probes]
        for output in llm.generate(inputs, params, use_tqdm=False):
            rows.append(_dense(output.prompt_logprobs, width))
        gc.collect()
    table = np.concatenate(rows)
    if int(reference.ids.max()) >= width:
        raise ValueError(f"vLLM knows {width} tokens, the reference scores {reference.ids.max()}")
    return Fingerprint(
        probes=reference.probes,
        ids=reference.ids,
        logprobs=np.take_along_axis(table, reference.ids.astype(np.int64), axis=1),
        top1=table.argmax(axis=1).astype(np.int32),
        engine="vllm",
    )


def _dense(flat: Any, width: int) -> NDArray[np.float32]:
    """vLLM's (position, token) lists of one prompt as an array of shape (T-1, width)."""
    ids = np.asarray(flat.token_ids, dtype=np.int64)
    values = np.asarray(flat.logprobs, dtype=np.float32)
    counts = np.asarray(flat.end_indices) - np.asarray(flat.start_indices)
    table: NDArray[np.float32] = np.full((len(counts), width), -np.inf, dtype=np.float32)
    table[np.repeat(np.arange(len(counts)), counts), ids] = values
    return table[1:]  # nothing predicts the first token


def _portions(probes: Sequence[tuple[int, ...]], width: int) -> Iterator[list[tuple[int, ...]]]:
    portion: list[tuple[int, ...]] = []
    for probe in probes:
        if portion and (sum(map(len, portion)) + len(probe)) * width > NUMBERS_AT_ONCE:
            yield portion
            portion = []
        portion.append(probe)
    if portion:
        yield portion


def generate(llm: Any, job: Job, *, temperature: float = 0.0) -> dict[str, Any]:
    """Continuations of the job's prompts: tokens (EOS included), why each ended, seconds for all.

    Temperature 0 is greedy; draws are the engine's, whose seed is the job's.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        max_tokens=job.max_new_tokens,
        stop_token_ids=list(job.stop or ()),
        detokenize=False,
    )
    began = time.perf_counter()
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in job.prompts]
    outputs = [o.outputs[0] for o in llm.generate(inputs, params, use_tqdm=False)]
    return {
        "tokens": [list(map(int, one.token_ids)) for one in outputs],
        "reasons": [one.finish_reason for one in outputs],
        "seconds": time.perf_counter() - began,
    }


def _rendered_differently(llm: Any, job: Job) -> int:
    """How many conversations vLLM's own tokenizer and chat template turn into other tokens."""
    if job.messages is None:
        return 0
    from tasks.serving.prompts import render_one

    tokenizer = llm.get_tokenizer()
    pairs = zip(job.messages, job.prompts, strict=True)
    return sum(render_one(tokenizer, messages) != prompt for messages, prompt in pairs)


if __name__ == "__main__":
    main()
    end_process()
