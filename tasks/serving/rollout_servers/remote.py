"""Speak to one vLLM server: policies and prompts in, token ids and log-probabilities out.

Completions are asynchronous, since hundreds are under way at once (`fleet.py`). All other requests
are not: they check the server and replace its weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, PlumblineError
from tasks.core.redaction import hide
from tasks.serving.vllm.colocation import Generated, Sampling

KEY_VARIABLE = "PLUMBLINE_API_KEY"
"""Variable with the API key of the servers. Keys of other services are never sent."""
PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between the attempts at a request; after the last one the server is lost."""
_ASK_S = 60.0
_TRIAL = [1, 2, 3]
"""Token ids of a trial; every vocabulary has them."""


class UnavailableError(PlumblineError):
    """A server cannot be reached, broke the connection, is busy, or failed with status 5xx."""


class RefusedError(PlumblineError):
    """A server refuses a request: no other server would accept it."""


@dataclass
class RemoteServer:
    """One vLLM server."""

    url: str  # address, without a slash at its end
    key: str = field(default="", repr=False)  # API key; "" for the variable `KEY_VARIABLE`
    base: str = ""  # name of the model that it serves; "" before `problems` has asked it
    model: str = ""  # name to sample from: an adapter's, or the base's
    lost: str = ""  # why it is not used any more; "" while it is

    def __post_init__(self) -> None:
        key = self.key or (os.environ.get(KEY_VARIABLE) or "").strip()
        if key:
            hide(key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, headers=self._headers, timeout=_ASK_S)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def connections(self) -> httpx.AsyncClient:
        """Return a client for any number of completions at once, without a time limit."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=10.0)
        return httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=timeout, limits=limits
        )

    def problems(self, adapter: bool, max_model_len: int) -> list[str]:
        """Return everything that keeps the server from sampling responses of a policy.

        `adapter`: the policy comes as an adapter; `max_model_len`: tokens of prompt and response.
        """
        try:
            version = self._json("GET", "/version").get("version")
            cards = self._json("GET", "/v1/models")["data"]
        except UnavailableError as error:
            return [error.message]
        except (RefusedError, KeyError, TypeError, AttributeError) as error:
            return [f"{self.url} is no vLLM server: {error}"]
        wrong = []
        first: Mapping[str, Any] = next((card for card in cards if card.get("parent") is None), {})
        self.base = self.model = str(first.get("id", ""))
        length = first.get("max_model_len") or 0
        if length < max_model_len:
            wrong.append(f"{self.url}: max_model_len is {length}, and {max_model_len} are needed")
        route, variable = "/collective_rpc", "VLLM_SERVER_DEV_MODE"
        if adapter:
            route, variable = "/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        if self._request("POST", route, {}).status_code in (404, 405):
            wrong.append(f"{self.url}: no {route}: it was started without {variable}=1")
        try:
            body = request_body(_TRIAL, Sampling(max_new_tokens=1), 1) | {"model": self.model}
            generated(self._json("POST", "/v1/completions", body), body, 0)
        except (UnavailableError, RefusedError, ArtifactError) as error:
            wrong.append(f"{error.message} (vLLM {version})")
        return wrong

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

    def load_adapter(self, name: str, folder: Path, timeout_s: float) -> None:
        """Load an adapter, under a new name, and sample from it from now on.

        The PEFT folder has to stay while it is used. Raises ArtifactError if the server refuses it,
        UnavailableError if the server is lost.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        self._load("/v1/load_lora_adapter", body, folder, timeout_s)
        listed = {str(card.get("id")) for card in self._json("GET", "/v1/models")["data"]}
        if name not in listed:
            raise ArtifactError(f"{self.url} loaded {name} and does not list it afterwards")
        self.model = name

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; one that is not there is no error."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, folder: Path, timeout_s: float) -> None:
        """Load full weights in the place of the present ones, and forget all cached prefixes.

        Raises ArtifactError if the server refuses them, UnavailableError if it is lost.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._load("/collective_rpc", body, folder, timeout_s)
        self._load("/reset_prefix_cache", {}, folder, timeout_s)

    def _load(self, path: str, body: Mapping[str, Any], folder: Path, timeout_s: float) -> None:
        response = self._request("POST", path, body, timeout_s)
        if not response.is_success:
            raise ArtifactError(
                f"{self.url} does not load {folder.name}: {reason(response)}",
                hint="rollout.sync_dir=<folder that all servers can read>, and a server that was "
                "started with the options that the error names",
            )

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        response = self._request(method, path, body)
        try:
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPStatusError, ValueError):
            raise RefusedError(f"{self.url}{path}: {reason(response)}") from None

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _ASK_S,
    ) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise _unavailable(self, error) from None


async def complete(
    server: RemoteServer, client: httpx.AsyncClient, body: Mapping[str, Any], version: int
) -> Generated:
    """Return the response to one request; try again while the server is busy or does not answer.

    Raises UnavailableError after the last attempt, RefusedError or ArtifactError at once.
    """
    body = {**body, "model": server.model}
    problem = UnavailableError(server.lost)
    for pause_s in (0.0, *PAUSES_S):
        await asyncio.sleep(pause_s)
        if server.lost:
            break
        try:
            response = await client.post("/v1/completions", json=body)
            if response.is_success:
                return generated(response.json(), body, version)
        except (httpx.HTTPError, ValueError) as error:
            problem = _unavailable(server, error)
            continue
        problem = UnavailableError(f"{server.url}: {reason(response)}")
        if response.status_code != 429 and response.status_code < 500:
            raise RefusedError(problem.message, hint="the log of the server says why")
    raise problem


def _unavailable(server: RemoteServer, error: Exception) -> UnavailableError:
    return UnavailableError(f"{server.url} does not answer ({type(error).__name__}: {error})")


def request_body(
    prompt: Sequence[int], sampling: Sampling, seed: int, *, greedy: bool = False
) -> dict[str, Any]:
    """Return the request for one response, without the name of the model.

    Every option of sampling is set: vLLM would take others from the model's folder.
    """
    kept = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    free = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
    }
    return {
        "prompt": list(map(int, prompt)),
        "max_tokens": sampling.max_new_tokens,
        **(kept if greedy else free),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "ignore_eos": True,  # end tokens come from `sampling`, not from the model folder
        "stop_token_ids": list(sampling.ends),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


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
