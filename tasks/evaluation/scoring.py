"""Measure models in a transformers child process.

    with ReferenceScorer(log=log, log_path=logs / "reference.log") as scorer:
        new = scorer.fingerprint(ModelRef(served), trained_fp, out / "fingerprint.fp")

The child (`tasks/serving/reference/child.py`) lives as long as the flow. So torch, transformers and
peft are imported once, and no stage imports torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import tasks.core.errors as errors
from tasks.core.errors import PlumblineError, StageProcessError
from tasks.drift.fingerprint import Fingerprint
from tasks.drift.reward_scores import SCORES, ScorePrint
from tasks.drift.verdict import Print
from tasks.process.launch import Conversation, python_child
from tasks.process.output import Log
from tasks.serving.prompts import Chat, chat, question_of

STAGE = "score"
REQUEST_S = 1800.0
"""Default time limit of one request."""


@dataclass(frozen=True)
class ModelRef:
    """A model to load."""

    path: Path  # Hugging Face folder; the base if there is an adapter
    adapter: Path | None = None  # PEFT folder of an unmerged adapter on top
    # `{"type": "nf4" | "fp4", "double_quant": bool, "compute_dtype": str}`; None for no
    # quantization
    quantization: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    # weights of several adapters by folder, instead of one adapter
    weighted: Mapping[str, float] | None = None
    device: str | None = None  # "cpu" or "cuda"; None for a GPU if there is one, else the CPU
    float32: bool = False  # True to compute in float32, with weights that are rounded to `dtype`

    def as_request(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "adapter": str(self.adapter) if self.adapter else None,
            "quantization": dict(self.quantization) if self.quantization else None,
            "weighted": dict(self.weighted) if self.weighted else None,
        }


Score = Callable[[ModelRef, Path, Path], Print]
"""(model, reference file, file to write) -> fingerprint of the model on the same probes."""


class Scorer(Protocol):
    """Measures models: `ReferenceScorer`."""

    def measure(self, model: ModelRef, reference: Path, out: Path) -> Print: ...

    def reference(
        self,
        model: ModelRef,
        out: Path,
        *,
        probes: Sequence[Sequence[int]] = (),
        like: Path | None = None,
        own: Path | None = None,
        base: Path | None = None,
    ) -> Fingerprint: ...


@dataclass(frozen=True)
class Prompts:
    """Token ids of rendered prompts, and the ids that end a response."""

    tokens: list[list[int]]
    eos: list[int]


@dataclass(frozen=True)
class Generated:
    """Responses of transformers."""

    tokens: list[list[int]]  # new tokens of each prompt, with EOS if it was reached
    # for each prompt and step the most likely (token, logit) pairs, best first; empty for sampled
    # responses
    candidates: list[list[list[tuple[int, float]]]]
    seconds: float  # time of generation without loading


class ReferenceScorer:
    """One transformers child process; a context manager. `measure` is a `Score`.

    The child starts with the first request, or with `warm`.
    """

    def __init__(
        self, *, log: Log, log_path: Path, threads: int | None = None, timeout_s: float = REQUEST_S
    ) -> None:
        self._log, self._log_path = log, log_path
        self._threads, self._timeout_s = threads, timeout_s
        self._child: Conversation | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.__exit__(*raised)

    def warm(self) -> None:
        """Start the child without waiting, so that its imports overlap with other work."""
        if self._child is None:
            argv = python_child("tasks.serving.reference.child")
            if self._threads is not None:
                argv += ["--threads", str(self._threads)]
            child = Conversation(argv, stage=STAGE, log=self._log, log_path=self._log_path, env=ENV)
            self._child = child.__enter__()

    def fingerprint(self, model: ModelRef, reference: Path, out: Path) -> Fingerprint:
        """Take the fingerprint of `model` at the token ids of `reference`, and save it to `out`."""
        request = {"reference": str(reference), "out": str(out)}
        self._ask("fingerprint", model=model.as_request(), **request)
        return Fingerprint.load(out)

    def measure(self, model: ModelRef, reference: Path, out: Path) -> Print:
        """Take the fingerprint, or the scores of a reward model, on the probes of `reference`."""
        if reference.name != SCORES:
            return self.fingerprint(model, reference, out)
        trained = ScorePrint.load(reference)
        probes = [list(probe) for probe in trained.probes]
        trained_on = trained.measured_on
        reply = self._ask(
            "rewards", model=model.as_request(), trained_on=trained_on, probes=probes, raw=True
        )
        scores_print = ScorePrint(
            trained.probes, tuple(reply["scores"]), "transformers", reply["noise"], reply["on"]
        )
        scores_print.save(out)
        return scores_print

    def reference(
        self,
        model: ModelRef,
        out: Path,
        *,
        probes: Sequence[Sequence[int]] = (),
        like: Path | None = None,
        own: Path | None = None,
        base: Path | None = None,
    ) -> Fingerprint:
        """Take the fingerprint that other models are compared with: in float32, with the noise."""
        paths = {"like": like, "own": own, "base": base}
        texts = {name: str(path) if path else None for name, path in paths.items()}
        request = {"model": model.as_request(), "probes": _lists(probes), "out": str(out), **texts}
        self._ask("reference", **request)
        return Fingerprint.load(out)

    def rewards(
        self, model: ModelRef, probes: Sequence[Sequence[int]], *, raw: bool = False
    ) -> list[float]:
        """Return the reward of each probe: normalised by the model's files, or the `raw` output."""
        reply = self._ask("rewards", model=model.as_request(), probes=_lists(probes), raw=raw)
        scores: list[float] = reply["scores"]
        return scores

    def encode_texts(self, tokenizer: Path, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """Return the token ids of plain texts, at most `limit` of each."""
        reply = self._ask("encode_texts", tokenizer=str(tokenizer), texts=list(texts), limit=limit)
        tokens: list[list[int]] = reply["tokens"]
        return tokens

    def greedy(
        self,
        model: ModelRef,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos: Sequence[int],
    ) -> Generated:
        """Generate greedily, one prompt at a time, until an id in `eos` or the limit."""
        reply = self._ask(
            "greedy",
            model=model.as_request(),
            prompts=_lists(prompts),
            max_new_tokens=max_new_tokens,
            eos=list(eos),
        )
        candidates = [
            [[(token, logit) for token, logit in step] for step in steps]
            for steps in reply["candidates"]
        ]
        return Generated(reply["tokens"], candidates, reply["seconds"])

    def sample(
        self,
        model: ModelRef,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        eos: Sequence[int],
    ) -> Generated:
        """Sample a response to each prompt; the same prompts give the same responses."""
        reply = self._ask(
            "drawn",
            model=model.as_request(),
            prompts=_lists(prompts),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            eos=list(eos),
        )
        return Generated(reply["tokens"], [], reply["seconds"])

    def token_logprobs(
        self, model: ModelRef, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probability of each token of each response, in nats."""
        texts = {"prompts": _lists(prompts), "replies": _lists(replies)}
        reply = self._ask("token_logprobs", model=model.as_request(), **texts)
        logprobs: list[list[float]] = reply["logprobs"]
        return logprobs

    def layer_errors(
        self, model: ModelRef, quantized: Path, rows: Sequence[Sequence[int]]
    ) -> list[tuple[str, float]]:
        """Return the relative output error of each layer once quantised, the largest first."""
        second = replace(model, path=quantized).as_request()
        reply = self._ask(
            "layer_errors", model=model.as_request(), quantized=second, rows=_lists(rows)
        )
        return [(str(name), float(error)) for name, error in reply["layers"]]

    def encode(
        self,
        tokenizer: Path,
        rows: Sequence[Mapping[str, Any]],
        *,
        template_from: Path | None = None,
    ) -> Prompts:
        """Render the prompts of dataset rows: everything before the assistant's last message."""
        reply = self._ask(
            "encode",
            tokenizer=str(tokenizer),
            rows=list(map(question_of, rows)),
            template_from=str(template_from) if template_from else None,
        )
        return Prompts(reply["prompts"], reply["eos"])

    def encode_whole(self, tokenizer: Path, conversations: Sequence[Chat]) -> list[list[int]]:
        """Return the token ids of conversations, with the id that ends the last message."""
        chats = [chat(row["messages"], row) for row in conversations]
        reply = self._ask("encode_whole", tokenizer=str(tokenizer), conversations=chats)
        tokens: list[list[int]] = reply["tokens"]
        return tokens

    def decode(self, tokenizer: Path, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return generated tokens as texts, without special tokens."""
        reply = self._ask("decode", tokenizer=str(tokenizer), tokens=_lists(tokens))
        texts: list[str] = reply["texts"]
        return texts

    def perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run a request of gather or merge that needs torch (`tasks/weights/execute/worker.py`)."""
        return self._ask("weights", request=dict(request))

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.warm()
        assert self._child is not None
        try:
            reply = self._child.ask({"do": do, **fields}, self._timeout_s)
        except StageProcessError as error:
            self.__exit__(type(error), error, None)  # the next request starts a new child
            raise
        if "result" in reply:
            return dict(reply["result"])
        raise _error(reply)


ENV = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment of the child. A process that forks must not have worker threads; it stays offline."""


def _lists(tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(ids) for ids in tokens]


def _error(reply: Mapping[str, Any]) -> PlumblineError:
    """Return the error of a reply with the class that it had in the child."""
    if "crash" in reply:
        return StageProcessError(STAGE, reply["crash"], reply["tail"])
    kind: type[PlumblineError] = getattr(errors, reply["failure"])
    return kind(reply["message"], details=reply["details"], hint=reply["hint"])
