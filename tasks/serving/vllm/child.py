"""The vLLM child: loads folders one after the other, measures each, and writes the results.

Importing vLLM takes longer than a small job, so it happens once, and each job runs in a fork with a
freshly loaded engine. Requests arrive on stdin (`job.VllmChild` sends them): each names the file of
a `job.Job`, beside which the fork writes `result.json` and `fingerprint.fp`. Prompts and results
are token ids; the parent handles texts.
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

from tasks.core.events import emit, send_warnings
from tasks.drift.fingerprint import Fingerprint
from tasks.process.torch_process import compiles, end_process, start_lean
from tasks.serving.vllm.job import RESULT, Job


def main() -> None:
    """Run the jobs that stdin names, each in a fork."""
    send_warnings()
    import_vllm()
    emit("ready")
    for line in sys.stdin:
        path = json.loads(line)["job"]
        if (pid := os.fork()) == 0:
            _run_and_exit(Path(path))
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"vLLM ended with status {os.waitstatus_to_exitcode(status)} on {path}")
        emit("reply")


def import_vllm() -> None:
    """Import everything without computing: a process with worker threads must not fork.

    Nor must one that has initialised CUDA, so torch asks NVML for GPUs (`torch/cuda/__init__.py`,
    `is_available`). vLLM 0.32 does not initialise it when imported.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    start_lean(compiler=compiles())
    from vllm import LLM  # noqa: F401


def _run_and_exit(path: Path) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _serve(Job(**json.loads(path.read_text())))
        status = 0
    except Exception:  # the parent shows the last lines
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(job: Job) -> None:
    out = Path(job.out)
    began = time.perf_counter()
    llm = _engine(job)
    result: dict[str, Any] = {"load_s": time.perf_counter() - began}
    if job.calls:
        from tasks.serving.vllm.module_calls import write_calls

        write_calls(llm, job.prompts, out)
    elif job.rewards:
        result["rewards"] = rewards(llm, job.prompts)
    else:
        if job.reference is not None:
            reference = Fingerprint.load(Path(job.reference))
            fingerprint(llm, reference).save(out / "fingerprint.fp")
        result["rendered_differently"] = _rendered_differently(llm, job)
        result["served"] = generate(llm, job)
        if job.temperature is not None:
            result["drawn"] = generate(llm, job, temperature=job.temperature)
    (out / RESULT).write_text(json.dumps(result))


def _engine(job: Job) -> Any:
    from vllm import LLM

    return LLM(
        model=job.served,
        dtype=job.dtype,
        seed=job.seed,
        enforce_eager=job.calls or not compiles(),  # graphs call no module
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
    """Return the reward model's score of each prompt, with the activation of its config.json."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [float(output.outputs.probs[0]) for output in llm.classify(inputs, use_tqdm=False)]


def fingerprint(llm: Any, reference: Fingerprint) -> Fingerprint:
    """Score the reference's probes at the reference's token ids, one probe at a time.

    Only these ids are requested: vLLM would return all log-probabilities as Python objects, ten
    million for a probe of 64 tokens and a vocabulary of 152k.
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


Scores = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Log-probabilities of given token ids, (T-1, K), and the most likely token id, (T-1,)."""


def _scored(llm: Any, probe: Sequence[int], ids: NDArray[np.int32]) -> Scores:
    """Score token ids (T-1, K) as predictions of a probe's T tokens, with vLLM's second runner."""
    flat, logprobs = _read(llm, probe, prompt_logprobs=1, prompt_logprob_token_ids=ids)
    # Each position holds the probe's token, then the most likely one; the first has none.
    best = np.asarray(flat.start_indices[1:]) + 1
    return np.asarray(logprobs, np.float32), np.asarray(flat.token_ids, np.int32)[best]


def _scored_by_worker(llm: Any, probe: Sequence[int], ids: NDArray[np.int32]) -> Scores:
    """Score token ids with vLLM's first runner (CPUs), which does not accept ids in a request."""
    llm.collective_rpc(_record_scores, args=(ids,))
    _read(llm, probe, prompt_logprobs=0)
    logprobs, top1 = zip(*llm.collective_rpc(_take_scores)[0], strict=True)
    return np.concatenate(logprobs), np.concatenate(top1)


def _read(llm: Any, probe: Sequence[int], **options: Any) -> tuple[Any, Any]:
    """Return a probe's log-probabilities, flat, and those of the requested token ids."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=1, flat_logprobs=True, detokenize=False, **options
    )
    (output,) = llm.generate([{"prompt_token_ids": list(probe)}], params, use_tqdm=False)
    return output.prompt_logprobs, output.prompt_token_id_logprobs


def _record_scores(worker: Any, ids: NDArray[np.int32]) -> None:
    """Make a worker record the log-probabilities of `ids` whenever it gathers a prompt's."""
    import torch

    sampler, wanted_ids = worker.model_runner.sampler, torch.from_numpy(ids).long()
    gather, scores = type(sampler).gather_logprobs, list[Scores]()

    def note(logprobs: Any, count: int, prompt: Any) -> Any:
        begin = sum(len(top1) for _, top1 in scores)
        at = wanted_ids[begin : begin + len(logprobs)].to(logprobs.device)
        top1 = logprobs.argmax(-1).to(torch.int32)
        scores.append((logprobs.gather(-1, at).float().cpu().numpy(), top1.cpu().numpy()))
        return gather(logprobs, count, prompt)

    sampler.gather_logprobs, sampler.noted = note, scores


def _take_scores(worker: Any) -> list[Scores]:
    """Return a worker's recorded scores, one entry per part of the prompt, and stop recording."""
    sampler = worker.model_runner.sampler
    scores: list[Scores] = sampler.noted
    del sampler.gather_logprobs, sampler.noted
    return scores


def generate(llm: Any, job: Job, *, temperature: float = 0.0) -> dict[str, Any]:
    """Sample the job's prompts; return tokens (with EOS), finish reasons and total seconds.

    Temperature 0 is greedy; otherwise the engine samples with the job's seed.
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
        "tokens": [list(map(int, output.token_ids)) for output in outputs],
        "reasons": [output.finish_reason for output in outputs],
        "seconds": time.perf_counter() - began,
    }


def _rendered_differently(llm: Any, job: Job) -> int:
    """Return the number of conversations that vLLM's own tokenizer renders to other token ids."""
    if job.chats is None:
        return 0
    from tasks.serving.prompts import render_one

    tokenizer = llm.get_tokenizer()
    pairs = zip(job.chats, job.prompts, strict=True)
    return sum(render_one(tokenizer, chat) != prompt for chat, prompt in pairs)


if __name__ == "__main__":
    main()
    end_process()
