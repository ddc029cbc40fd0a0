"""Speak to `llama-server` of llama.cpp: next tokens after token ids, its tokeniser and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.scoring import SAMPLED, entry, score_next
from tasks.verify.servers.server import (
    Abilities,
    Entry,
    Generated,
    Message,
    Prompt,
    Scores,
    ServedModel,
    Server,
    ServerError,
    Tools,
    UnsupportedError,
    chat_fields,
)

_TOP = 100
_FORCED = 100.0
"""Bias that makes a token certain."""
_WITHOUT = "@base"
"""Ending of the name under which the base is asked without any adapter."""
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppServer(Server):
    """A server of llama.cpp.

    Its model's name is what a client gets: with the adapters of the command line at their default
    scales. With adapters there are two kinds of names more, which `lora` of each request selects:
    the adapters' file names without ending, and the base as `<model>@base`.

    Args:
        http: the connection.
        props: answer of `/props`.
        sampled: positions of a sequence that `score` measures, at most; each is a request.
    """

    def __init__(self, http: Http, props: Mapping[str, Any], sampled: int = SAMPLED) -> None:
        self.http = http
        self._sampled = sampled
        self.url = http.url
        self.kind = "llama.cpp"
        self.version = str(props.get("build_info", ""))
        self.abilities = Abilities(True, 0, _TOP, True, True)
        settings = props.get("default_generation_settings") or {}
        length = settings.get("n_ctx")
        self._length = length if isinstance(length, int) else None
        self._path = str(props.get("model_path", "")) or None
        self._models, self._lora = self._names()
        # Log-probabilities are those before biases. A token that is a whole letter is forced: after
        # a part of a letter the server waits for the rest, and returns none.
        letter = self.tokenize(self._models[0].name, "a", special=False)[-1]
        self._bias = [[letter, _FORCED]]

    def models(self) -> tuple[ServedModel, ...]:
        """Return the names that the server answers to; the base before its adapters."""
        return self._models

    def score(
        self, model: str, sequences: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Scores]:
        """Return the log-probabilities of a sample of positions of each sequence.

        The prompt cache is not used: it mixes adapters (llama.cpp issue 26207), which is for the
        check of leaks to find.
        """
        return score_next(
            lambda prefixes: self._next_tokens(model, prefixes, workers, cache_prompt=False),
            sequences,
            self._sampled,
        )

    def next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated."""
        return self._next_tokens(model, prefixes, workers)

    def _next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], workers: int | None, **more: bool
    ) -> list[Entry]:
        body = {"n_predict": 1, "n_probs": _TOP, "temperature": 0, "logit_bias": self._bias, **more}

        def ask(prefix: Sequence[int]) -> Entry:
            answer = self._completion(model, list(map(int, prefix)), body)
            listed = answer.get("completion_probabilities") or [{}]
            tops = listed[0].get("top_logprobs") or ()
            return entry({int(top["id"]): top["logprob"] for top in tops})

        return self.http.parallel(ask, list(prefixes), workers)

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        body = {"content": text, "add_special": special, "parse_special": True}
        return tuple(self.http.post("/tokenize", body)["tokens"])

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.http.post("/detokenize", {"tokens": list(map(int, ids))})["content"])

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template.

        A chat request tokenises its prompt with special tokens, as here.
        """
        prompt = self.http.post("/apply-template", chat_fields(messages, tools))["prompt"]
        return self.tokenize(model, str(prompt))

    def generate(
        self,
        model: str,
        prompt: Prompt,
        count: int,
        n: int = 1,
        *,
        stream: bool = False,
        **sampling: Any,
    ) -> list[Generated]:
        """Return n responses of at most `count` tokens."""
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            body = {"messages": list(prompt), "max_tokens": count, **self._selected(model)}
            return self._repeated(n, lambda _: self._chat({**body, **sampling}))
        ids = [int(token) for token in prompt if not isinstance(token, Mapping)]
        body = {"n_predict": count, "return_tokens": True, **sampling}
        if stream:
            return self._repeated(n, lambda _: self._streamed(model, ids, body))
        return self._repeated(n, lambda _: _generated(self._completion(model, ids, body)))

    def _repeated(self, n: int, work: Any) -> list[Generated]:
        return self.http.parallel(work, list(range(n)))

    def _chat(self, body: Mapping[str, Any]) -> Generated:
        # Log-probabilities are asked for because they name the ids.
        answer = self.http.post("/v1/chat/completions", {**body, "logprobs": True})
        choice = answer["choices"][0]
        told = (choice.get("logprobs") or {}).get("content")
        usage = answer.get("usage") or {}
        return Generated(
            ids=tuple(int(token["id"]) for token in told) if told else None,
            text=str((choice.get("message") or {}).get("content") or ""),
            finish=str(choice.get("finish_reason") or ""),
            prompt_length=usage.get("prompt_tokens"),
        )

    def _streamed(self, model: str, ids: Sequence[int], body: Mapping[str, Any]) -> Generated:
        text, tokens = "", list[int]()
        last: Mapping[str, Any] = {}
        request = {"prompt": list(ids), **body, **self._selected(model), "stream": True}
        for part in self.http.events("/completion", request):
            text += part.get("content", "")
            tokens += part.get("tokens") or []
            last = part
        if len(tokens) < last.get("tokens_predicted", 0):
            raise UnsupportedError(f"{self.url} does not stream tokens that are parts of a letter")
        return _generated({**last, "content": text, "tokens": tokens})

    def _completion(self, model: str, ids: Sequence[int], body: Mapping[str, Any]) -> Any:
        request = {"prompt": list(ids), **body, **self._selected(model)}
        answer = self.http.post("/completion", request)
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}/completion: no response", code="response")
        return answer

    def _selected(self, model: str) -> dict[str, Any]:
        """Return the field that selects the adapters of a request."""
        if model not in self._lora:
            names = ", ".join(self._lora)
            raise ServerError(
                f"{self.url} serves no model {model!r}",
                details=[f"it serves {names}"],
                hint=f"name={next(iter(self._lora))}",
                code="model",
            )
        scales = self._lora[model]
        return {} if scales is None else {"lora": scales}

    def _names(self) -> tuple[tuple[ServedModel, ...], dict[str, list[dict[str, Any]] | None]]:
        """Return the models, and the scales of all adapters for each name."""
        cards = self.http.get("/v1/models").get("data") or [{}]
        name = str(cards[0].get("id") or "default")
        models = [ServedModel(name, None, self._path, self._length)]
        lora: dict[str, list[dict[str, Any]] | None] = {name: None}
        adapters = self.http.optional("/lora-adapters")
        adapters = adapters if isinstance(adapters, list) else []
        if adapters:
            base = name + _WITHOUT
            models.append(ServedModel(base, None, self._path, self._length))
            lora[base] = [{"id": adapter["id"], "scale": 0.0} for adapter in adapters]
        for chosen in adapters:
            path = PurePath(str(chosen["path"]))
            models.append(ServedModel(path.stem, name + _WITHOUT, str(path), self._length))
            lora[path.stem] = [
                {"id": adapter["id"], "scale": float(adapter["id"] == chosen["id"])}
                for adapter in adapters
            ]
        return tuple(models), lora


def _generated(answer: Mapping[str, Any]) -> Generated:
    stop = str(answer.get("stop_type", ""))
    tokens, length = answer.get("tokens"), answer.get("tokens_evaluated")
    return Generated(
        ids=tuple(tokens) if tokens else None,
        text=str(answer.get("content", "")),
        finish=_FINISH.get(stop, stop),
        prompt_length=length if isinstance(length, int) else None,
    )
