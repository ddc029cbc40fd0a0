"""The vLLM child: serves one folder, measures it, and says what came out.

    python -m tasks.serving.vllm_child job.json

The only importer of vllm. It works in token ids throughout: prompts in, tokens out; texts are the
parent's business. `job.Job` is what it reads, `result.json` and `fingerprint.fp` what it leaves.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.fingerprint import Fingerprint
from tasks.serving.job import Job
from tasks.serving.load import slim_imports
from tasks.weights.header import read_header

NUMBERS_AT_ONCE = 4_000_000
"""Log-probabilities asked for in one call: vLLM hands them out as Python objects (~100 B each)."""


def main() -> None:
    """Do the job named on the command line."""
    job = Job.load(Path(sys.argv[1]))
    out = Path(job.out)
    began = time.perf_counter()
    llm = _engine(job)
    result: dict[str, Any] = {"load_s": time.perf_counter() - began}
    if job.reference is not None:
        reference = Fingerprint.load(Path(job.reference))
        fingerprint(llm, reference).save(out / "fingerprint.fp")
    result["rendered_differently"] = _rendered_differently(llm, job)
    result["served"] = generate(llm, job.prompts, limit=job.max_new_tokens, stop=job.stop)
    if job.base is not None and same_tensors(Path(job.served), Path(job.base)):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": job.base})
        prompts = job.base_prompts or job.prompts
        result["base"] = generate(llm, prompts, limit=job.max_new_tokens, stop=job.base_stop)
    (out / "result.json").write_text(json.dumps(result))


def _engine(job: Job) -> Any:
    import torch

    cpu = not torch.accelerator.is_available()
    if cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling costs more than it gives here
    slim_imports()
    from vllm import LLM

    return LLM(
        model=job.served,
        dtype=job.dtype,
        seed=job.seed,
        enforce_eager=cpu,
        max_model_len=job.max_model_len,
        max_num_batched_tokens=max(2048, job.max_model_len),
        max_num_seqs=64,
        max_logprobs=-1,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


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


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], *, limit: int, stop: Sequence[int] | None
) -> dict[str, Any]:
    """Greedy continuations: tokens (EOS included), why each ended, seconds for all."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=limit, stop_token_ids=list(stop or ()), detokenize=False
    )
    began = time.perf_counter()
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
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


IGNORED = {"dtype", "torch_dtype", "transformers_version", "eos_token_id", "bos_token_id",
           "pad_token_id", "use_cache", "_name_or_path"}  # fmt: skip
"""Keys of config.json that change no tensor and no arithmetic of a forward pass."""


def same_tensors(one: Path, other: Path) -> bool:
    """Whether weights of one folder can be poured into an engine built for the other.

    Not with tied embeddings: vLLM's CPU engine keeps its packed copy of the output head then, and
    goes on answering with the old one.
    """
    if _config(one).get("tie_word_embeddings", True):
        return False
    return _config(one) == _config(other) and _shapes(one) == _shapes(other)


def _config(folder: Path) -> dict[str, Any]:
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key not in IGNORED}


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: info.shape for header in headers for name, info in header.tensors.items()}


if __name__ == "__main__":
    main()
