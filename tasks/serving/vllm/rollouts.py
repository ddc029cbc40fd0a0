"""vLLM inside a training rank: token ids in; token ids and log-probabilities out.

The engine runs in the rank's own process (`external_launcher`) and starts after DeepSpeed. vLLM
assumes a process of its own: it seeds the random generators, pins threads, sets environment
variables, and destroys the default process group when an engine ends. `undisturbed` undoes it.

Responses depend only on weights, prompts and seeds: each response has a random generator of its
own, and no call reuses another call's prefix cache.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.process.torch_process import compiles, on_gpu
from tasks.serving.vllm.colocation import Colocation, Generated
from tasks.serving.vllm.job import FLASHINFER_SAMPLER
from tasks.serving.vllm.loaded_adapter import LoadedAdapter
from tasks.serving.vllm.lora_ops import use_single_adapter_products

if TYPE_CHECKING:
    import torch

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of the memory that sleep frees."""


class Colocated:
    """A vLLM engine inside a training rank."""

    def __init__(self, how: Colocation) -> None:
        """Start the engine. Raises ConfigError, or vLLM's own errors."""
        self.how = how
        # Bytes of the GPU that torch had reserved when the engine went to sleep, and those of them
        # that it gave back then, which torch still counts.
        self.awake = self.slept = 0
        with undisturbed():
            self._llm = _start(how)
        self._adapter: Any = None
        self._asleep: list[str] = []
        self._loaded: Any = LoadedAdapter(self._llm)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Replace the adapter by one from a PEFT folder, which may be deleted afterwards.

        Raises ArtifactError if vLLM rejects it, TrainingError if the tensors in vLLM differ.
        """
        from vllm.lora.request import LoRARequest

        core = self._llm.llm_engine
        if self._adapter is not None:
            core.remove_lora(self._adapter.lora_int_id)
            self._adapter = None
        request = LoRARequest(f"policy-{version}", version, str(folder))
        with _accepted(version):
            core.add_lora(request)
        self._loaded.require_sent(folder, version)
        self._adapter = request

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the full weights by a checkpoint's tensors, by their keys on disk, tied ones too.

        Raises ArtifactError if vLLM rejects them.
        """
        remaining = iter(tensors)
        with _accepted(version):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": remaining})
        for _ in remaining:  # the caller checks its contract after the last one
            pass

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        limits: Sequence[int],
        *,
        greedy: bool = False,
    ) -> list[Generated]:
        """Sample one response per prompt; repeat a prompt to get several responses.

        Raises TrainingError for a timeout, or if the weights are not those that were synced.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = [
            SamplingParams(
                **self.how.request(seed, limit, greedy=greedy),
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        return [_generated(output.outputs[0]) for output in self._outputs(prompts, params)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Return the log-probability of every token but the first of each sequence, (T-1,).

        They are at temperature 1, whatever the temperature of sampling is.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        outputs = self._outputs(sequences, [params] * len(sequences))
        flats = [output.prompt_logprobs for output in outputs]
        return [np.asarray(flat.logprobs)[np.asarray(flat.start_indices[1:])] for flat in flats]

    def _outputs(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """Return vLLM's output for each prompt with its parameters."""
        core, outputs = self._llm.llm_engine, dict[str, Any]()
        self._loaded.require_unchanged()
        names = [str(number) for number in range(len(prompts))]
        until = time.monotonic() + self.how.timeout_s
        with undisturbed():
            self._llm.reset_prefix_cache()
            for name, prompt, how in zip(names, prompts, params, strict=True):
                ids = {"prompt_token_ids": list(map(int, prompt))}
                core.add_request(name, ids, how, lora_request=self._adapter)
            while core.has_unfinished_requests():
                finished = [output for output in core.step() if output.finished]
                if finished:
                    self._loaded.require_used()
                outputs |= {output.request_id: output for output in finished}
                if time.monotonic() > until:
                    raise self.how.overdue(len(names) - len(outputs), len(names))
        return [outputs[name] for name in names]

    def sleep(self) -> bool:
        """Free a GPU's memory until the engine wakes; return True if the weights are dropped.

        The base of an adapter moves to host memory. Full weights are dropped, since each sync sends
        all of them. vLLM 0.32 keeps the model's buffers by itself (`gpu_worker.py`, `sleep`). Does
        nothing on a CPU.
        """
        if not on_gpu() or self._asleep:
            return False
        import torch

        full = self.how.adapter_rank is None
        self.awake = max(self.awake, torch.cuda.memory_reserved())
        free = _free_bytes()
        self._llm.sleep(level=2 if full else 1)
        self.slept = _free_bytes() - free
        self._asleep = [WEIGHTS, CACHE]
        return full

    def wake(self, *tags: str) -> None:
        """Take memory again: that of these tags, or all of it."""
        for tag in [tag for tag in tags or (WEIGHTS, CACHE) if tag in self._asleep]:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def close(self) -> None:
        """Shut the engine down and free its memory; the ranks' process group stays.

        A sleeping engine has given its memory back, and vLLM would unmap it a second time.
        """
        if self._llm is None or self._asleep:
            return
        import torch

        with undisturbed():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._adapter = self._loaded = None
            gc.collect()
            if on_gpu():
                torch.cuda.empty_cache()


def _free_bytes() -> int:
    """Return the free memory of this rank's GPU; 0 without one."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@contextlib.contextmanager
def _accepted(version: int) -> Iterator[None]:
    """Turn vLLM's errors on weights that it does not accept into an ArtifactError."""
    try:
        with undisturbed():
            yield
    except (ValueError, RuntimeError, KeyError, IndexError, AssertionError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0][:300] if lines else type(error).__name__
        raise ArtifactError(f"vLLM refuses version {version} of the policy: {reason}") from error


def _start(how: Colocation) -> Any:
    """Return a `vllm.LLM`; call it inside `undisturbed`."""
    # vLLM reads some of these at import and some later.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = FLASHINFER_SAMPLER
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between its own libraries
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import core

    # vLLM's own function destroys the default process group when an engine ends.
    core.cleanup_dist_env_and_memory = gc.collect
    gpu = on_gpu()
    options = how.options() | {
        "model": str(how.model),
        "skip_tokenizer_init": True,
        "language_model_only": True,  # of a vision-language model
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": not compiles(),
        "max_num_batched_tokens": max(2048, how.max_model_len),
        # vLLM 0.32 rewinds the generator of a half-read prompt, which fails with a CPU's generator
        # as soon as the prompts exceed one batch.
        "enable_chunked_prefill": gpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if gpu:
        options |= {"gpu_memory_utilization": how.rollout.gpu_memory, "enable_sleep_mode": True}
    else:
        use_single_adapter_products()
        trust = how.trust_remote_code
        model = EngineArgs(str(how.model), trust_remote_code=trust).create_model_config()
        options |= {
            # vLLM caches a recurrent state only between chunks.
            "enable_prefix_caching": not (model.is_hybrid or model.is_attention_free),
            "kv_cache_memory_bytes": int(how.rollout.kv_cache_gib * 2**30),
            # Unused here, but checked at start, when other ranks hold memory too.
            "gpu_memory_utilization": 0.01,
        }
    options |= {"load_format": "dummy"} if how.adapter_rank is None else {"max_cpu_loras": 1}
    return LLM(**options)


def _generated(output: Any) -> Generated:
    flat = output.logprobs
    at = np.asarray(flat.start_indices, dtype=np.int64)  # the sampled token comes first
    ids = np.asarray(output.token_ids, dtype=np.int32)
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)[at]
    return Generated(ids, logprobs, output.finish_reason == "stop")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the process state that vLLM changes.

    These are the random generators, the environment (`LD_PRELOAD` for its children,
    `LOCAL_WORLD_SIZE`), and on a CPU `torch.set_num_threads`, which vLLM disables.
    """
    import torch

    environment, threads = dict(os.environ), torch.set_num_threads
    count, dtype = torch.get_num_threads(), torch.get_default_dtype()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_num_threads = threads
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if devices is not None:
            # After a failure this raises as well, and would hide the reason.
            with contextlib.suppress(*([RuntimeError] if sys.exception() else [])):
                torch.cuda.set_rng_state(devices)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
