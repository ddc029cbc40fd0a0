"""Start vLLM servers for rollouts on this machine's free GPUs or on its CPU cores.

The servers listen on loopback with an API key of this run. They belong to the supervised children
of the rank that starts them (`tasks/process/child.py`), so they end with it and with the flow,
whatever happens to either.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import TrainingError
from tasks.serving.http_server import HOST, NAME, EndedError, Server, free_port
from tasks.serving.rollout_servers.remote import RemoteServer
from tasks.serving.vllm.colocation import Colocation, Sampling, room_for_rank
from tasks.serving.vllm.job import environment
from tasks.serving.vllm.server import plugin, serve_command

LOG = logging.getLogger("plumbline.rl")
_OF_RANKS = (
    "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "OMP_", "MKL_", "TORCHELASTIC_",
    "TORCHDYNAMO_", "TORCH_NCCL_", "DS_",
)  # fmt: skip
"""Prefixes of a rank's variables that a server must not inherit: it would take itself for one."""


def switches(how: Colocation) -> dict[str, str]:
    """Return the environment variables that let a server take new weights."""
    as_adapter = how.adapter_rank is not None
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING" if as_adapter else "VLLM_SERVER_DEV_MODE": "1"}


def options(how: Colocation, sampling: Sampling) -> list[str]:
    """Return the options of `vllm serve` that rollouts need, wherever the server runs."""
    length = str(how.max_model_len)
    words = ["--dtype", how.dtype, "--max-model-len", length]
    words += ["--max-num-seqs", str(how.max_num_seqs)]
    words += ["--tensor-parallel-size", str(how.tensor_parallel)]
    words += ["--logprobs-mode", sampling.logprobs_mode, "--generation-config", "vllm"]
    if how.trust_remote_code:
        words.append("--trust-remote-code")
    if how.adapter_rank is None:
        # A tied head would keep its old packed copy on a CPU, so it is untied and synced, too.
        return [*words, "--hf-overrides", '{"tie_word_embeddings": false}']
    rank = str(room_for_rank(how.adapter_rank))
    return [*words, "--enable-lora", "--max-lora-rank", rank, "--max-loras", "1"]


def typed_command(how: Colocation, sampling: Sampling) -> str:
    """Return the command line that starts a server for this run on another machine."""
    variables = [f"{name}={value}" for name, value in switches(how).items()]
    words = ["vllm", "serve", str(how.model), "--host", "0.0.0.0", "--port", "8000"]
    return " ".join([*variables, shlex.join([*words, *options(how, sampling)])])


@dataclass(frozen=True)
class Place:
    """Machine resources of one server."""

    gpus: tuple[str, ...] = ()  # values for CUDA_VISIBLE_DEVICES; empty on a CPU
    threads: int = 1  # on a CPU


def places(
    count: int, how: Colocation, *, gpus: int, ranks: int, busy_threads: int, threads: int | None
) -> list[Place]:
    """Return a place for each server: GPUs after those of the ranks, or equal parts of the cores.

    The ranks have `busy_threads` CPU threads while servers generate. The preflight has counted the
    GPUs.
    """
    if not gpus:
        cores = max(1, len(os.sched_getaffinity(0)) - busy_threads)
        return [Place(threads=threads or max(1, cores // count))] * count
    size = how.tensor_parallel
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(gpus)]
    starts = range(ranks, ranks + count * size, size)
    return [Place(gpus=tuple(names[start : start + size])) for start in starts]


class StartedServer:
    """A vLLM server that this run started."""

    def __init__(
        self, how: Colocation, sampling: Sampling, place: Place, *, log_path: Path
    ) -> None:
        self._log_path, self._until = log_path, time.monotonic() + how.timeout_s
        port, key = free_port(), secrets.token_hex(16)
        words = ["--host", HOST, "--port", str(port), "--served-model-name", NAME]
        words += ["--uvicorn-log-level", "warning", *options(how, sampling)]
        words += ["--max-num-batched-tokens", str(max(2048, how.max_model_len))]
        env = environment(1, place.threads) | switches(how) | {"VLLM_API_KEY": key}
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if place.gpus:
            del env["OMP_NUM_THREADS"]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
            words += ["--gpu-memory-utilization", str(how.gpu_memory)]
        else:
            nbytes = str(int(how.kv_cache_gib * 2**30))
            words += ["--kv-cache-memory-bytes", nbytes, "--gpu-memory-utilization", "0.01"]
            # vLLM 0.32 rewinds the generator of a half-read prompt, which a CPU's cannot do.
            words += ["--no-enable-chunked-prefill", "--enforce-eager"]
            env |= plugin(log_path.parent) | {"TORCHDYNAMO_DISABLE": "1"}
        unset = [name for name in os.environ if name.startswith(_OF_RANKS) and name not in env]
        argv = ["env", *(word for name in unset for word in ("-u", name))]
        argv += [*serve_command(how.model), *words]
        self._server = Server(argv, port, stage="rollout", log=LOG, log_path=log_path, env=env)
        self.remote = RemoteServer(self._server.url, key=key)

    def wait(self) -> None:
        """Wait until the server is healthy.

        Raises TrainingError with its last lines if it has ended or the time is over.
        """
        try:
            self._server.wait_until_healthy(self._until)
        except EndedError:
            tail = self._server.last_lines()
            ended = "ended" if self._server.child.poll() is not None else "is not ready in time"
            raise TrainingError(
                f"a rollout server {ended}: {tail[-1] if tail else ''}",
                details=[*tail, f"log: {self._log_path}"],
                hint="more memory: rollout.kv_cache_gib=<GiB> on a CPU, rollout.gpu_memory=<share> "
                "on a GPU; or rollout=vllm",
            ) from None

    def end(self) -> None:
        """End the server and all of its processes."""
        self._server.end()

    @property
    def pid(self) -> int:
        """Process id of the server's supervisor."""
        return self._server.child.pid
