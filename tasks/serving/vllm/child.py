"""The vLLM child: serves folders one after the other, measures each, and says what came out.

    python -m tasks.serving.vllm.child job.json [job.json ...]

The only importer of vllm. That import takes longer than all the rest, so it happens once, and every
job runs in a fork of its own: an engine that is loaded afresh, never one into which other weights
were poured. It works in token ids throughout: prompts in, tokens out; texts are the parent's
business. `job.Job` is what it reads, `result.json` and `fingerprint.fp` what it leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import Fingerprint
from tasks.process.block_unused_imports import compiles, start_lean
from tasks.process.exit_process import end_process
from tasks.serving import forks
from tasks.serving.vllm.job import Job

ALONE = "--alone"


def main() -> None:
    """Do the jobs named on the command line, each in a fork; after `ALONE` one, in this process."""
    _import_vllm()
    if sys.argv[1] == ALONE:
        _child(Path(sys.argv[2]))
    for path in sys.argv[1:]:
        pid = os.fork()
        if pid == 0:
            if forks.cuda_is_lost():
                forks.start_again("tasks.serving.vllm.child", ALONE, path)
            _child(Path(path))
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"vLLM ended with status {os.waitstatus_to_exitcode(status)} on {path}")


def _import_vllm() -> None:
    """All imports and no arithmetic: a process that has worker threads must not fork."""
    forks.keep_cuda_unused()
    start_lean(compiler=compiles())
    from vllm import LLM  # noqa: F401


def _child(path: Path) -> NoReturn:
    """Do a job, and end this process."""
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
    from vllm import LLM

    return LLM(
        model=job.served,
        dtype=job.dtype,
        seed=job.seed,
        enforce_eager=not compiles(),
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
    """Score the reference's probes at the reference's ids, one probe at a time.

    All log-probabilities are never asked for: vLLM would hand each out as a Python object, ten
    million of them for a probe of 64 tokens and a vocabulary of 152k.
    """
    width = llm.llm_engine.model_config.get_vocab_size()
    if int(reference.ids.max()) >= width:
        raise ValueError(f"vLLM knows {width} tokens, the reference scores {reference.ids.max()}")
    scored = _scored if llm.llm_engine.vllm_config.use_v2_model_runner else _scored_by_worker
    ends = np.cumsum([len(probe) - 1 for probe in reference.probes])
    rows = np.split(reference.ids, ends[:-1])
    scores = [scored(llm, probe, ids) for probe, ids in zip(reference.probes, rows, strict=True)]
    return Fingerprint(
        probes=reference.probes,
        ids=reference.ids,
        logprobs=np.concatenate([logprobs for logprobs, _ in scores]),
        top1=np.concatenate([top1 for _, top1 in scores]),
        engine="vllm",
    )


Scored = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Log-probabilities of some ids, shape (T-1, K), and the most likely id, shape (T-1,)."""


def _scored(llm: Any, probe: Sequence[int], ids: NDArray[np.int32]) -> Scored:
    """Score ids, shape (T-1, K), as predictions of a probe's T tokens; on vLLM's second runner."""
    flat, logprobs = _read(llm, probe, prompt_logprobs=1, prompt_logprob_token_ids=ids)
    # Each position has the probe's own token, then the most likely one; the first has none.
    best = np.asarray(flat.start_indices[1:]) + 1
    return np.asarray(logprobs, np.float32), np.asarray(flat.token_ids, np.int32)[best]


def _scored_by_worker(llm: Any, probe: Sequence[int], ids: NDArray[np.int32]) -> Scored:
    """The same on vLLM's first runner (CPUs), which scores ids of its own choice alone."""
    llm.collective_rpc(_score_instead, args=(ids,))
    _read(llm, probe, prompt_logprobs=0)
    logprobs, top1 = zip(*llm.collective_rpc(_take_scores)[0], strict=True)
    return np.concatenate(logprobs), np.concatenate(top1)


def _read(llm: Any, probe: Sequence[int], **asked: Any) -> tuple[Any, Any]:
    """Log-probabilities of a probe, flat, and those of ids that were asked for."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=1, flat_logprobs=True, detokenize=False, **asked
    )
    (output,) = llm.generate([{"prompt_token_ids": list(probe)}], params, use_tqdm=False)
    return output.prompt_logprobs, output.prompt_token_id_logprobs


def _score_instead(worker: Any, ids: NDArray[np.int32]) -> None:
    """Have a worker note the log-probabilities of `ids` whenever it gathers a prompt's."""
    import torch

    sampler, wanted = worker.model_runner.sampler, torch.from_numpy(ids).long()
    gather, scores = type(sampler).gather_logprobs, list[Scored]()

    def note(logprobs: Any, count: int, prompt: Any) -> Any:
        begin = sum(len(top1) for _, top1 in scores)
        at = wanted[begin : begin + len(logprobs)].to(logprobs.device)
        top1 = logprobs.argmax(-1).to(torch.int32)
        scores.append((logprobs.gather(-1, at).float().cpu().numpy(), top1.cpu().numpy()))
        return gather(logprobs, count, prompt)

    sampler.gather_logprobs, sampler.noted = note, scores


def _take_scores(worker: Any) -> list[Scored]:
    """Return what a worker has noted, part by part of the prompt; it notes no more."""
    sampler = worker.model_runner.sampler
    found: list[Scored] = sampler.noted
    del sampler.gather_logprobs, sampler.noted
    return found


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
