"""Speak to one vLLM server: policies and prompts in, token ids and log-probabilities out.

Completions are asynchronous, since hundreds are under way at once (`dealing.py`). All other
requests are not: they check the server and replace its weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
_ASK_S = 60.0
_EXCERPT = 300
_TRIAL = [1, 2, 3]
"""Token ids of a trial; every vocabulary has them."""


class UnavailableError(PlumblineError):
    """A server cannot be reached, closed the connection, or failed with a status of 500 or more."""


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
    # returns True once the process of a server that this run started has ended
    has_ended: Callable[[], bool] = lambda: False
    _client: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._client = httpx.Client(base_url=self.url, headers=headers(self.key), timeout=_ASK_S)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def problems(self, *, adapter: bool, max_model_len: int) -> list[str]:
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
        route, variable = (
            ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
            if adapter
            else ("/collective_rpc", "VLLM_SERVER_DEV_MODE")
        )
        if self._request("POST", route, {}).status_code in (404, 405):
            wrong.append(f"{self.url}: no {route}: it was started without {variable}=1")
        try:
            body = request_body(_TRIAL, Sampling(max_new_tokens=1), 1) | {"model": self.model}
            trial = self._json("POST", "/v1/completions", body)
            generated(trial, self.model, 0)
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
            raise ArtifactError(
                f"{self.url}: log-probabilities of {sum(map(len, listed))} of "
                f"{sum(map(len, sequences))} tokens"
            )
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
        response = self._request("POST", "/v1/load_lora_adapter", body, timeout_s)
        if not response.is_success:
            raise self._refused(response, folder)
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
        kwargs = {"weights_path": str(folder)}
        body = {"method": "reload_weights", "kwargs": kwargs}
        for path, content in (("/collective_rpc", body), ("/reset_prefix_cache", {})):
            response = self._request("POST", path, content, timeout_s)
            if not response.is_success:
                raise self._refused(response, folder)

    def _refused(self, response: httpx.Response, folder: Path) -> ArtifactError:
        return ArtifactError(
            f"{self.url} does not load {folder.name}: {reason(response)}",
            hint="rollout.sync_dir=<folder that all servers can read>, and a server that was "
            "started with the options that the error names",
        )

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        response = self._request(method, path, body)
        if not response.is_success:
            raise RefusedError(f"{self.url}{path}: {reason(response)}")
        try:
            return response.json()
        except ValueError:
            raise RefusedError(f"{self.url}{path}: the response is no JSON") from None

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
            raise UnavailableError(
                f"{self.url} does not answer ({type(error).__name__}: {error})"
            ) from None


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


def headers(key: str = "") -> dict[str, str]:
    """Return the headers of all requests: the API key, by default that of `KEY_VARIABLE`."""
    key = key or (os.environ.get(KEY_VARIABLE) or "").strip()
    if not key:
        return {}
    hide(key)
    return {"Authorization": f"Bearer {key}"}


def reason(response: httpx.Response) -> str:
    """Return the status and the server's own words for it."""
    try:
        document = response.json()
        error = document.get("error", document)
        text = error.get("message") or document.get("detail") or response.text
    except (ValueError, AttributeError):
        text = response.text
    return f"{response.status_code} {' '.join(str(text).split())[:_EXCERPT]}"


def generated(answer: Mapping[str, Any], model: str, version: int) -> Generated:
    """Return the response in a server's answer to a request for `model`.

    Raises ArtifactError if another model answered, or token ids or log-probabilities are missing.
    """
    if answer.get("model") != model:
        raise ArtifactError(f"{answer.get('model')} answered instead of {model}")
    choice = answer["choices"][0]
    ids = choice.get("token_ids") or []
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if not ids or len(ids) != len(logprobs) or None in logprobs:
        raise ArtifactError(
            f"a response with {len(ids)} token ids and {len(logprobs)} log-probabilities: the "
            "server does not return both, as vLLM 0.10.2 and later do"
        )
    return Generated(
        np.asarray(ids, np.int32),
        np.asarray(logprobs, np.float32),
        choice.get("finish_reason") == "stop",
        version,
    )
