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
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import TrainingError
from tasks.process.output import Output
from tasks.serving import http_server
from tasks.serving.http_server import HOST, NAME
from tasks.serving.rollout_servers.remote import RemoteServer
from tasks.serving.vllm.colocation import Colocation, Sampling, room_for_rank
from tasks.serving.vllm.job import environment
from tasks.serving.vllm.server import plugin, serve_command

STAGE = "rollout"
LOG = logging.getLogger("plumbline.rl")
_OF_RANKS = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHDYNAMO_DISABLE",
    "DS_ACCELERATOR", "MKL_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
"""Variables of a rank that a server must not inherit: it would take itself for one."""


def switches(how: Colocation, sampling: Sampling) -> dict[str, str]:
    """Return the environment variables that let a server take new weights."""
    name = (
        "VLLM_SERVER_DEV_MODE" if how.adapter_rank is None else "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    )
    return {name: "1"}


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
    variables = [f"{name}={shlex.quote(value)}" for name, value in switches(how, sampling).items()]
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

    The ranks have `busy_threads` CPU threads while servers generate. Raises TrainingError if there
    are fewer GPUs.
    """
    if not gpus:
        cores = max(1, len(os.sched_getaffinity(0)) - busy_threads)
        return [Place(threads=threads or max(1, cores // count))] * count
    needed, size = ranks + count * how.tensor_parallel, how.tensor_parallel
    if gpus < needed:
        raise TrainingError(
            f"rollout.servers={count} needs {needed} GPUs: {ranks} for the ranks and {size} for "
            f"each server; {gpus} are visible",
            hint=f"train.nproc={max(1, gpus - count * size)}, or rollout=vllm",
        )
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(gpus)]
    starts = range(ranks, needed, size)
    return [Place(gpus=tuple(names[start : start + size])) for start in starts]


class StartedServer:
    """A vLLM server that this run started."""

    def __init__(
        self, how: Colocation, sampling: Sampling, place: Place, *, log_path: Path
    ) -> None:
        self._how, self._sampling, self._place, self._log_path = how, sampling, place, log_path
        self._key = secrets.token_hex(16)
        self._stack = ExitStack()
        self.remote = self._launch()

    def wait(self, until: float) -> None:
        """Wait until the server is healthy; `until` is a time of `time.monotonic()`.

        Raises TrainingError with its last lines if it has ended or the time is over.
        """
        port = int(self.remote.url.rpartition(":")[2])
        try:
            http_server.wait_until_healthy(self._child, port, until)
        except http_server.EndedError:
            self._reader.join(2.0)
            ended = "ended" if self._child.poll() is not None else "is not ready in time"
            raise TrainingError(
                f"a rollout server {ended}: {self._output.tail[-1] if self._output.tail else ''}",
                details=[*self._output.tail, f"log: {self._log_path}"],
                hint="more memory: rollout.kv_cache_gib=<GiB> on a CPU, rollout.gpu_memory=<share> "
                "on a GPU; or rollout=vllm",
            ) from None

    def end(self) -> None:
        """End the server and all of its processes."""
        self.remote.close()
        self._stack.close()

    @property
    def pid(self) -> int:
        """Process id of the server's supervisor."""
        return self._child.pid

    def _launch(self) -> RemoteServer:
        port, gpu = http_server.free_port(), bool(self._place.gpus)
        words = ["--host", HOST, "--port", str(port), "--served-model-name", NAME]
        words += ["--uvicorn-log-level", "warning", *options(self._how, self._sampling)]
        words += ["--max-num-batched-tokens", str(max(2048, self._how.max_model_len))]
        env = environment(1, self._place.threads)
        env |= switches(self._how, self._sampling) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        env |= {"VLLM_API_KEY": self._key}
        if gpu:
            env = {k: v for k, v in env.items() if k != "OMP_NUM_THREADS"}
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._place.gpus)
            words += ["--gpu-memory-utilization", str(self._how.gpu_memory)]
        else:
            nbytes = str(int(self._how.kv_cache_gib * 2**30))
            words += ["--kv-cache-memory-bytes", nbytes, "--gpu-memory-utilization", "0.01"]
            # vLLM 0.32 rewinds the generator of a half-read prompt, which a CPU's cannot do.
            words += ["--no-enable-chunked-prefill", "--enforce-eager"]
            env |= plugin(self._log_path.parent)
            env["TORCHDYNAMO_DISABLE"] = "1"
        unset = [word for name in _OF_RANKS if name not in env for word in ("-u", name)]
        argv = ["env", *unset, *serve_command(self._how.model), *words]
        self._stack = stack = ExitStack()
        output = stack.enter_context(Output(stage=STAGE, log=LOG, log_path=self._log_path))
        self._output = output
        self._child = child = stack.enter_context(http_server.started(argv, env))
        self._reader = threading.Thread(
            target=http_server.pass_on, args=(child, output), daemon=True
        )
        self._reader.start()
        return RemoteServer(
            f"http://{HOST}:{port}", key=self._key, has_ended=lambda: child.poll() is not None
        )


def wait_for_all(servers: Sequence[StartedServer], timeout_s: float) -> None:
    """Wait until all servers are healthy; they start at the same time. Raises TrainingError."""
    until = time.monotonic() + timeout_s
    for server in servers:
        server.wait(until)
