"""Measure models in a transformers child process.

    with ReferenceScorer(log=log, log_path=logs / "reference.log") as scorer:
        new = scorer.fingerprint(ModelRef(served), trained_fp, out / "fingerprint.fp")

The child (`tasks/serving/reference/child.py`) lives as long as the flow. So torch, transformers and
peft are imported once, and no stage imports torch itself.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple

import tasks.core.errors as errors
from tasks.core.errors import PlumblineError, StageProcessError
from tasks.drift.fingerprint import Fingerprint, ScorePrint
from tasks.drift.verdict import Print
from tasks.process.launch import Conversation, python_child
from tasks.process.output import Log
from tasks.serving.prompts import (
    Chat,
    Prompts,
    decode,
    encode_texts,
    question_of,
    render,
    render_whole,
)
from tasks.serving.reference import requests
from tasks.serving.reference.requests import ARGUMENTS, RESULT, Generated, ModelRef, Tokens
from tasks.witness.plumbline_witness.prints import SCORES

__all__ = ["ENV", "REQUEST_S", "Generated", "ModelRef", "Prompts", "ReferenceScorer", "Score"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

STAGE = "score"
REQUEST_S = 1800.0
"""Default time limit of one request."""
ENV = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment of the child, which stays offline."""
Score = Callable[[ModelRef, Path, Path], Print]
"""(model, reference file, file to write) -> fingerprint of the model on the same probes."""


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
                argv.append(str(self._threads))
            child = Conversation(argv, stage=STAGE, log=self._log, log_path=self._log_path, env=ENV)
            self._child = child.__enter__()

    def perform(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Run a module-level function in the child; arguments and result are pickled.

        Raises the PlumblineError that it raised, or StageProcessError if it crashed or took too
        long.
        """
        self.warm()
        assert self._child is not None
        with tempfile.TemporaryDirectory(prefix="plumbline-") as name:
            folder = Path(name)
            (folder / ARGUMENTS).write_bytes(pickle.dumps(arguments))
            path = f"{function.__module__}:{function.__qualname__}"
            request = {"function": path, "folder": name}
            try:
                reply = self._child.ask(request, self._timeout_s)
            except StageProcessError as error:
                self.__exit__(type(error), error, None)  # the next request starts a new child
                raise
            if "crash" in reply:
                raise StageProcessError(STAGE, reply["crash"], reply["tail"])
            if "failure" in reply:  # an error with the class that it had in the child
                kind: type[PlumblineError] = getattr(errors, reply["failure"])
                raise kind(reply["message"], details=reply["details"], hint=reply["hint"])
            result: T = pickle.loads((folder / RESULT).read_bytes())
            return result

    def fingerprint(self, model: ModelRef, reference: Path, out: Path) -> Fingerprint:
        """Take the fingerprint of `model` at the token ids of `reference`, and save it to `out`."""
        self.perform(requests.fingerprint, model, reference, out)
        return Fingerprint.load(out)

    def measure(self, model: ModelRef, reference: Path, out: Path) -> Print:
        """Take the fingerprint, or the scores of a reward model, on the probes of `reference`."""
        if reference.name != SCORES:
            return self.fingerprint(model, reference, out)
        trained = ScorePrint.load(reference)
        now = self.perform(requests.rewards, model, trained.probes, True, trained.measured_on)
        scores = ScorePrint(trained.probes, tuple(now.scores), "transformers", now.noise, now.on)
        scores.save(out)
        return scores

    def reference(
        self,
        model: ModelRef,
        out: Path,
        *,
        probes: Tokens = (),
        like: Path | None = None,
        own: Path | None = None,
        base: Path | None = None,
    ) -> Fingerprint:
        """Take the fingerprint that other models are compared with: in float32, with the noise.

        The ids are those of `like`, or chosen by the model at `probes`. `own` gets a fingerprint in
        the model's own dtype at the ids of `like`, `base` one without the adapter.
        """
        self.perform(requests.reference, model, out, probes, like, own, base)
        return Fingerprint.load(out)

    def rewards(self, model: ModelRef, probes: Tokens, *, raw: bool = False) -> list[float]:
        """Return the reward of each probe: normalised by the model's files, or the `raw` output."""
        return self.perform(requests.rewards, model, probes, raw, None).scores

    def encode_texts(self, tokenizer: Path, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """Return the token ids of plain texts, at most `limit` of each."""
        return self.perform(encode_texts, tokenizer, texts, limit)

    def generate(
        self,
        model: ModelRef,
        prompts: Tokens,
        most: int,
        stops: Sequence[int],
        temperature: float = 0.0,
    ) -> Generated:
        """Generate at most `most` tokens for each prompt, until an id in `stops`.

        Greedily, or sampled at the temperature: the same prompts give the same responses.
        """
        return self.perform(requests.generate, model, prompts, most, stops, temperature)

    def token_logprobs(
        self, model: ModelRef, prompts: Tokens, responses: Tokens
    ) -> list[list[float]]:
        """Return the log-probability of each token of each response, in nats."""
        return self.perform(requests.token_logprobs, model, prompts, responses)

    def encode(
        self,
        tokenizer: Path,
        rows: Sequence[Mapping[str, Any]],
        *,
        template_from: Path | None = None,
    ) -> Prompts:
        """Render the prompts of dataset rows: everything before the assistant's last message."""
        return self.perform(render, tokenizer, list(map(question_of, rows)), template_from)

    def encode_whole(self, tokenizer: Path, conversations: Sequence[Chat]) -> list[list[int]]:
        """Return the token ids of conversations, with the id that ends the last message."""
        return self.perform(render_whole, tokenizer, conversations)

    def decode(self, tokenizer: Path, tokens: Tokens) -> list[str]:
        """Return generated tokens as texts, without special tokens."""
        return self.perform(decode, tokenizer, tokens)
