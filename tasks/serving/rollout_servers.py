"""vLLM servers of `rollout=server`: policies and prompts in, token ids and log-probabilities out.

    fleet = Fleet(how, [RemoteServer(url)])                servers elsewhere, and
    fleet.start(2, logs, ...)                              those that this run starts here
    fleet.each(lambda server: server.load_adapter(...))    a new policy, on every server
    fleet.generate(bodies, version=3)                      by all servers together

Prompts stand in one queue: a server that is free takes the next, and each is answered once. A
server that does not answer after a few attempts is lost: its prompts go back to the queue. With no
server left the run ends, and the same command goes on from the last checkpoint.

Started servers listen on loopback with an API key of this run, on free GPUs or on CPU cores. They
end with the rank that started them (`tasks/process/child.py`), whatever happens to it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, ConfigError, PlumblineError, TrainingError
from tasks.core.redaction import hide
from tasks.serving.http_server import HOST, NAME, EndedError, Server, free_port
from tasks.serving.vllm.colocation import (
    DIRECT,
    KEY_VARIABLE,
    Colocation,
    Generated,
    why_not_started,
    words,
)
from tasks.serving.vllm.job import environment
from tasks.serving.vllm.server import plugin, serve_command

T = TypeVar("T")
LOG = logging.getLogger("plumbline.rl")
PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between the attempts at a request; after the last one the server is lost."""
_REQUEST_S = 60.0
_OF_RANKS = (
    "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "OMP_", "MKL_", "TORCHELASTIC_",
    "TORCHDYNAMO_", "TORCH_NCCL_", "DS_",
)  # fmt: skip
"""Prefixes of a rank's variables that a server must not inherit: it would take itself for one."""


class UnavailableError(PlumblineError):
    """A server cannot be reached, broke the connection, is busy, or failed with status 5xx."""


class RefusedError(PlumblineError):
    """A server refuses a request: no other server would accept it."""


@dataclass
class RemoteServer:
    """One vLLM server; its methods may run in several threads at once."""

    url: str  # address, without a slash at its end
    key: str = field(default="", repr=False)  # API key; "" for the variable `KEY_VARIABLE`
    base: str = ""  # name of the model that it serves; "" before `problem` has asked it
    model: str = ""  # name to sample from: an adapter's, or the base's
    lost: str = ""  # why it is not used any more; "" while it is

    def __post_init__(self) -> None:
        key = self.key or (os.environ.get(KEY_VARIABLE) or "").strip()
        if key:
            hide(key)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            mounts=DIRECT,
        )

    def close(self) -> None:
        """Unload the adapter, if there is one, and close the connections."""
        if self.model != self.base and not self.lost:
            with suppress(PlumblineError):
                self.unload_adapter(self.model)
        self._client.close()

    def problem(self, max_model_len: int) -> str:
        """Return why the server cannot sample responses, or "".

        `max_model_len`: tokens of prompt and response. Options that it lacks show at the first
        sync.
        """
        try:
            cards = self._json("GET", "/v1/models")["data"]
            first = next(card for card in cards if card.get("parent") is None)
            self.base = self.model = str(first["id"])
            length = int(first["max_model_len"])
        except UnavailableError as error:
            return error.message
        except (RefusedError, StopIteration, KeyError, TypeError, AttributeError) as error:
            return f"{self.url} is no vLLM server: {error}"
        if length < max_model_len:
            return f"{self.url}: max_model_len is {length}, and {max_model_len} are needed"
        return ""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Return the log-probability of every token but the first of each sequence, (T-1,).

        They are at temperature 1, whatever the temperature of sampling is.
        """
        prompts = [list(map(int, ids)) for ids in sequences]
        body: dict[str, Any] = {"model": self.model, "prompt": prompts, "max_tokens": 1}
        body |= {"temperature": 0.0, "prompt_logprobs": 0}
        choices = self._json("POST", "/v1/completions", body)["choices"]
        by_index = sorted(choices, key=lambda choice: int(choice["index"]))
        listed = [choice.get("prompt_logprobs") or [] for choice in by_index]
        if list(map(len, listed)) != list(map(len, sequences)):
            raise ArtifactError(f"{self.url} does not return the log-probability of every token")
        return [
            np.array([places[i][str(ids[i])]["logprob"] for i in range(1, len(ids))])
            for ids, places in zip(prompts, listed, strict=True)
        ]

    def load_adapter(self, folder: Path, timeout_s: float) -> None:
        """Load an adapter by the name of its folder, and sample from it from now on.

        The PEFT folder has to stay while it is used. Raises ArtifactError if the server refuses it,
        UnavailableError if the server is lost.
        """
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        self._load("/v1/load_lora_adapter", body, folder, timeout_s)
        listed = {str(card.get("id")) for card in self._json("GET", "/v1/models")["data"]}
        if folder.name not in listed:
            raise ArtifactError(f"{self.url} loaded {folder.name} and does not list it afterwards")
        self.model = folder.name

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; one that is not there is no error."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, folder: Path, timeout_s: float) -> None:
        """Load full weights in the place of the present ones, and forget all cached prefixes.

        Errors are those of `load_adapter`.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._load("/collective_rpc", body, folder, timeout_s)
        self._load("/reset_prefix_cache", {}, folder, timeout_s)

    def complete(self, body: Mapping[str, Any], version: int, until: float) -> Generated:
        """Return the response to one request; try again while the server does not answer.

        `until` is a time of `time.monotonic()`. Raises UnavailableError after the last attempt,
        RefusedError or ArtifactError at once.
        """
        body, problem = {**body, "model": self.model}, UnavailableError(self.lost)
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(pause_s)
            left = until - time.monotonic()
            if self.lost or left <= 0:
                break
            try:
                response = self._request("POST", "/v1/completions", body, left)
            except UnavailableError as error:
                problem = error
                continue
            if response.is_success:
                return generated(response.json(), body, version)
            problem = UnavailableError(f"{self.url}: {reason(response)}")
            if response.status_code != 429 and response.status_code < 500:
                raise RefusedError(problem.message, hint="the log of the server says why")
        raise problem

    def _load(self, path: str, body: Mapping[str, Any], folder: Path, timeout_s: float) -> None:
        response = self._request("POST", path, body, timeout_s)
        if not response.is_success:
            what = f"{self.url}{path} does not load {folder.name}: {reason(response)}"
            raise ArtifactError(f"{what}: has the server the options below, can it read {folder}?")

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        response = self._request(method, path, body)
        try:
            return response.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError):
            raise RefusedError(f"{self.url}{path}: {reason(response)}") from None

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _REQUEST_S,
    ) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            what = f"{self.url} does not answer ({type(error).__name__}: {error})"
            raise UnavailableError(what) from None


def request_body(
    prompt: Sequence[int], how: Colocation, seed: int, *, limit: int, greedy: bool = False
) -> dict[str, Any]:
    """Return the request for one response, without the name of the model."""
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    options = how.request(seed, limit, greedy=greedy)
    return {"prompt": list(map(int, prompt)), **options, **ids}


def reason(response: httpx.Response) -> str:
    """Return the status and the start of the server's own words for it."""
    return f"{response.status_code} {' '.join(response.text.split())[:300]}"


def generated(answer: Mapping[str, Any], body: Mapping[str, Any], version: int) -> Generated:
    """Return the response in a server's answer to a request.

    Raises ArtifactError if another model answered, token ids or log-probabilities are missing, or
    the server cuts responses.
    """
    if answer.get("model") != body["model"]:
        raise ArtifactError(f"{answer.get('model')} answered instead of {body['model']}")
    choice = answer["choices"][0]
    ids = choice.get("token_ids") or []
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if not ids or len(ids) != len(logprobs) or None in logprobs:
        raise ArtifactError(
            f"a response with {len(ids)} token ids and {len(logprobs)} log-probabilities: the "
            "server does not return both, as vLLM 0.10.2 and later do"
        )
    ended = choice.get("finish_reason") == "stop"
    if not ended and len(ids) < body["max_tokens"]:
        raise ArtifactError(
            f"the server cuts responses after {len(ids)} of {body['max_tokens']} tokens",
            hint="start it without a limit of its own (max_new_tokens)",
        )
    return Generated(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), ended, version)


@dataclass
class Fleet:
    """The rollout servers of a run."""

    how: Colocation  # settings of a server and its requests
    servers: list[RemoteServer] = field(default_factory=list)  # lost ones, too
    started: list[Server] = field(default_factory=list)  # those that this run has started

    def start(
        self, count: int, logs: Path, *, ranks: int, gpus: int, busy: int, threads: int | None
    ) -> None:
        """Start servers and wait until all are ready.

        On the GPUs after those of the ranks (the preflight has counted them), or on equal parts of
        the CPU cores without the `busy` ones, on which ranks train while servers generate. Raises
        TrainingError with the last lines of a server that has ended or is not ready in time.
        """
        until, size = time.monotonic() + self.how.timeout_s, self.how.rollout.tensor_parallel
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = visible or list(map(str, range(gpus)))
        cores = max(1, len(os.sched_getaffinity(0)) - busy)
        for number in range(count):
            place = names[ranks + number * size :][:size] if gpus else []
            log_path = logs / f"rollout-server-{number}.log"
            self._start(place, threads or max(1, cores // count), log_path)
        for number, server in enumerate(self.started):
            try:
                server.wait_until_healthy(until)
            except EndedError:
                tail = server.last_lines()
                ended = "ended" if server.child.poll() is not None else "is not ready in time"
                reason, hint = why_not_started(tail)
                raise TrainingError(
                    f"a rollout server {ended}: {reason}",
                    details=[*tail, f"log: {logs / f'rollout-server-{number}.log'}"],
                    hint=hint or "rollout.timeout_s=<more>; or rollout=vllm",
                ) from None

    def _start(self, gpus: Sequence[str], threads: int, log_path: Path) -> None:
        """Start a server on these GPUs, or with CPU threads."""
        how, port, key = self.how, free_port(), secrets.token_hex(16)
        options = how.options() | {
            "host": HOST,
            "port": port,
            "served_model_name": NAME,
            "uvicorn_log_level": "warning",
            "max_num_batched_tokens": max(2048, how.max_model_len),
        }
        env = environment(1, threads) | {switch(how): "1", "VLLM_API_KEY": key}
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if gpus:
            del env["OMP_NUM_THREADS"]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            options["gpu_memory_utilization"] = how.rollout.gpu_memory
        else:
            options |= {
                "kv_cache_memory_bytes": int(how.rollout.kv_cache_gib * 2**30),
                "gpu_memory_utilization": 0.01,
                # vLLM 0.32 rewinds the generator of a half-read prompt, which a CPU's cannot do.
                "no_enable_chunked_prefill": True,
                "enforce_eager": True,
            }
            env |= plugin(log_path.parent) | {"TORCHDYNAMO_DISABLE": "1"}
        unset = [name for name in os.environ if name.startswith(_OF_RANKS) and name not in env]
        argv = ["env", *(word for name in unset for word in ("-u", name))]
        argv += [*serve_command(how.model), *words(options)]
        server = Server(argv, port, stage="rollout", log=LOG, log_path=log_path, env=env)
        self.started.append(server)
        self.servers.append(RemoteServer(server.url, key=key))

    @property
    def present(self) -> list[RemoteServer]:
        """Return the servers that are not lost."""
        return [server for server in self.servers if not server.lost]

    def require_able(self) -> None:
        """Raise ConfigError with the problem of every server, and the command of a good one."""
        problems = [server.problem(self.how.max_model_len) for server in self.servers]
        if problems := list(filter(None, problems)):
            raise ConfigError(
                f"rollout servers: {problems[0]}", details=problems, hint=self._command
            )

    def generate(
        self,
        bodies: Sequence[dict[str, Any]],
        version: int,
        servers: Sequence[RemoteServer] | None = None,
    ) -> list[Generated]:
        """Return the responses to requests, in order, by all servers or by some of them.

        Raises TrainingError if no server is left or the time is over, ArtifactError if a server
        does not return what is needed.
        """
        queue, answers = deque(range(len(bodies))), dict[int, Generated]()
        until = time.monotonic() + self.how.timeout_s

        def work(server: RemoteServer) -> None:
            while not server.lost and time.monotonic() < until:
                try:
                    number = queue.popleft()
                except IndexError:
                    return
                try:
                    answers[number] = server.complete(bodies[number], version, until)
                except UnavailableError as error:
                    queue.appendleft(number)
                    if not server.lost and time.monotonic() < until:
                        server.lost = error.message
                        LOG.warning("rollout server lost (%s)", server.lost)
                except PlumblineError:  # no other server would do better
                    queue.clear()
                    raise

        while len(answers) < len(bodies):  # again if a lost server gave prompts back
            if time.monotonic() >= until:
                raise self.how.overdue(len(bodies) - len(answers), len(bodies))
            present = [server for server in servers or self.servers if not server.lost]
            if not present:
                raise self._none_left()
            # Each takes turns, so that few requests are spread over all servers.
            workers = present * min(self.how.rollout.max_num_seqs, len(queue))
            with ThreadPoolExecutor(max(1, len(workers))) as pool:
                list(pool.map(work, workers))
        return [answers[number] for number in range(len(bodies))]

    def each(self, work: Callable[[RemoteServer], T]) -> dict[str, T]:
        """Return the results of all present servers, asked at the same time, by address.

        Raises ArtifactError if servers refuse; details name each. Raises TrainingError if no server
        is left.
        """
        results, refused = dict[str, T](), list[str]()

        def attempt(server: RemoteServer) -> None:
            try:
                results[server.url] = work(server)
            except (ArtifactError, RefusedError) as error:
                refused.append(error.message)
            except (UnavailableError, TrainingError) as error:
                server.lost = server.lost or error.message

        present = self.present
        with ThreadPoolExecutor(max(1, len(present))) as pool:
            list(pool.map(attempt, present))
        if refused:
            raise ArtifactError(refused[0], details=refused, hint=self._command)
        if not self.present:
            raise self._none_left()
        return {server.url: results[server.url] for server in self.present}

    def close(self) -> None:
        """End the servers of this run, and leave the others without the policy."""
        for started in self.started:
            started.end()
        for server in self.servers:
            server.close()

    @property
    def _command(self) -> str:
        """The command line that starts a server for this run on another machine."""
        argv = ["vllm", "serve", str(self.how.model), "--host", "0.0.0.0", "--port", "8000"]
        argv += words(self.how.options())
        return f"a server for this run: {switch(self.how)}=1 {shlex.join(argv)}"

    def _none_left(self) -> TrainingError:
        lost = [server.lost for server in self.servers]
        return TrainingError(
            f"no rollout server is left: {lost[0] if lost else 'none was named'}",
            details=lost,
            hint="the servers' logs say why; start them again and run the same command: it "
            "goes on from the last checkpoint",
        )


def switch(how: Colocation) -> str:
    """Return the environment variable that lets a server take new weights."""
    as_adapter = how.adapter_rank is not None
    return "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if as_adapter else "VLLM_SERVER_DEV_MODE"
