"""Measuring models from the parent's side: what to load, and who scores it.

    with ReferenceScorer(log=log, log_path=logs / "reference.log") as scorer:
        new = scorer.fingerprint(ModelRef(served), trained_fp, out / "fingerprint.fp")

The work happens in one warm child (`tasks/serving/reference/child.py`), so that no stage imports
torch for it and torch, transformers and peft are imported once a flow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tasks.core.errors as errors
from tasks.core.errors import PlumblineError, StageProcessError
from tasks.drift.fingerprint import Fingerprint
from tasks.drift.reward_scores import SCORES, ScorePrint
from tasks.drift.verdict import Print
from tasks.process.launch import Conversation, python_child
from tasks.process.output import Log

STAGE = "score"


@dataclass(frozen=True)
class ModelRef:
    """What to load, and how.

    Attributes:
        path: Hugging Face folder; the base when `adapter` is given.
        adapter: PEFT folder to put on top, unmerged.
        quantization: `{"type": "nf4" | "fp4", "double_quant": bool, "compute_dtype": str}`; None
            for none.
        dtype: torch dtype name.
        attn_implementation: as in transformers.
        weighted: several adapters instead of one: the weight of each, by folder.
        device: "cpu" or "cuda", where there is one; None: a GPU where there is one.
    """

    path: Path
    adapter: Path | None = None
    quantization: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    weighted: Mapping[str, float] | None = None
    device: str | None = None

    def as_request(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "adapter": str(self.adapter) if self.adapter else None,
            "quantization": dict(self.quantization) if self.quantization else None,
            "weighted": dict(self.weighted) if self.weighted else None,
        }


Score = Callable[[ModelRef, Path, Path], Print]
"""(model, reference print, file to write) -> the model's print at the same places."""


@dataclass(frozen=True)
class Prompts:
    """Rendered prompts as token ids, and the ids at which an answer ends."""

    tokens: list[list[int]]
    eos: list[int]


@dataclass(frozen=True)
class Greedy:
    """Continuations.

    Attributes:
        tokens: for every prompt its new tokens, EOS included where it was reached.
        candidates: for every prompt and step the most likely (token, logit) pairs, best first.
        seconds: time spent generating, loading excluded.
    """

    tokens: list[list[int]]
    candidates: list[list[list[tuple[int, float]]]]
    seconds: float


class ReferenceScorer:
    """One warm transformers child; a context manager. `fingerprint` is a `Score`.

    Nothing is started before the first question, or before `warm`.

    Args:
        log: gets the child's own output.
        log_path: file for all of it.
        threads: CPU threads for the arithmetic. None: what torch decides. Use the training
            engine's own number where equality to the last bit matters.
        timeout_s: for one answer, loading included.
    """

    def __init__(
        self, *, log: Log, log_path: Path, threads: int | None = None, timeout_s: float = 1800.0
    ) -> None:
        self._log, self._log_path = log, log_path
        self._threads, self._timeout_s = threads, timeout_s
        self._child: Conversation | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.__exit__(kind, error, traceback)

    def warm(self) -> None:
        """Start the child without waiting, so that its imports overlap with other work."""
        if self._child is None:
            argv = python_child("tasks.serving.reference.child")
            if self._threads is not None:
                argv += ["--threads", str(self._threads)]
            child = Conversation(argv, stage=STAGE, log=self._log, log_path=self._log_path, env=ENV)
            self._child = child.__enter__()

    def fingerprint(self, model: ModelRef, reference: Path, out: Path) -> Fingerprint:
        """Score `reference`'s probes at its ids with `model`, and save the result to `out`."""
        request = {"reference": str(reference), "out": str(out)}
        self._ask("fingerprint", model=model.as_request(), **request)
        return Fingerprint.load(out)

    def measure(self, model: ModelRef, reference: Path, out: Path) -> Print:
        """Take the print of `model` where `reference`, of either kind, was taken."""
        if reference.name != SCORES:
            return self.fingerprint(model, reference, out)
        trained = ScorePrint.load(reference)
        asked = {"probes": [list(probe) for probe in trained.probes], "raw": True}
        reply = self._ask(
            "rewards", model=model.as_request(), trained_on=trained.measured_on, **asked
        )
        scores_print = ScorePrint(
            trained.probes, tuple(reply["scores"]), "transformers", reply["noise"], reply["on"]
        )
        scores_print.save(out)
        return scores_print

    def reference(self, model: ModelRef, probes: Sequence[Sequence[int]], out: Path) -> Fingerprint:
        """Score probes with a model that chooses the ids itself, and save the result to `out`."""
        asked = [list(probe) for probe in probes]
        self._ask("reference", model=model.as_request(), probes=asked, out=str(out))
        return Fingerprint.load(out)

    def rewards(
        self, model: ModelRef, probes: Sequence[Sequence[int]], *, raw: bool = False
    ) -> list[float]:
        """What a reward model gives for each probe: normalised as its files say, or `raw`."""
        asked = [list(probe) for probe in probes]
        reply = self._ask("rewards", model=model.as_request(), probes=asked, raw=raw)
        scores: list[float] = reply["scores"]
        return scores

    def encode_texts(self, tokenizer: Path, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """Token ids of plain texts, at most `limit` of each."""
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
    ) -> Greedy:
        """Continue each prompt greedily, one at a time, until an id in `eos` or the limit."""
        reply = self._ask(
            "greedy",
            model=model.as_request(),
            prompts=[list(p) for p in prompts],
            max_new_tokens=max_new_tokens,
            eos=list(eos),
        )
        pairs = [[[(i, x) for i, x in step] for step in one] for one in reply["candidates"]]
        return Greedy(reply["tokens"], pairs, reply["seconds"])

    def drawn(
        self,
        model: ModelRef,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        eos: Sequence[int],
    ) -> Greedy:
        """Continue each prompt with draws, the same ones for the same prompts; no candidates."""
        reply = self._ask(
            "drawn",
            model=model.as_request(),
            prompts=[list(p) for p in prompts],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            eos=list(eos),
        )
        return Greedy(reply["tokens"], [], reply["seconds"])

    def token_logprobs(
        self, model: ModelRef, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Log-probability of each token of each reply, nats."""
        asked = {
            "prompts": [list(one) for one in prompts],
            "replies": [list(one) for one in replies],
        }
        reply = self._ask("token_logprobs", model=model.as_request(), **asked)
        found: list[list[float]] = reply["logprobs"]
        return found

    def encode(
        self,
        tokenizer: Path,
        rows: Sequence[Mapping[str, Any]],
        *,
        template_from: Path | None = None,
    ) -> Prompts:
        """Render dataset rows up to where the assistant's last answer begins."""
        reply = self._ask(
            "encode",
            tokenizer=str(tokenizer),
            rows=[{"messages": row["messages"]} for row in rows],
            template_from=str(template_from) if template_from else None,
        )
        return Prompts(reply["prompts"], reply["eos"])

    def encode_whole(
        self, tokenizer: Path, conversations: Sequence[Sequence[Mapping[str, str]]]
    ) -> list[list[int]]:
        """Token ids of whole conversations, up to the id that ends the last answer."""
        asked = [list(one) for one in conversations]
        reply = self._ask("encode_whole", tokenizer=str(tokenizer), conversations=asked)
        tokens: list[list[int]] = reply["tokens"]
        return tokens

    def decode(self, tokenizer: Path, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Texts of generated tokens, special tokens left out."""
        reply = self._ask("decode", tokenizer=str(tokenizer), tokens=[list(t) for t in tokens])
        texts: list[str] = reply["texts"]
        return texts

    def perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do the part of gather and merge that needs torch (`weights/execute/worker.py`)."""
        return self._ask("weights", request=dict(request))

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.warm()
        assert self._child is not None
        try:
            reply = self._child.ask({"do": do, **fields}, self._timeout_s)
        except StageProcessError as error:
            self.__exit__(type(error), error, None)  # it is gone; the next question gets a new one
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
"""No worker threads may exist in a process that forks; nothing is fetched from anywhere."""


def _error(reply: Mapping[str, Any]) -> PlumblineError:
    """The error that a reply carries, as what it was in the child."""
    if "crash" in reply:
        return StageProcessError(STAGE, reply["crash"], reply["tail"])
    kind: type[PlumblineError] = getattr(errors, reply["failure"])
    return kind(reply["message"], details=reply["details"], hint=reply["hint"])
