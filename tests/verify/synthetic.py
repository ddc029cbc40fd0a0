"""Models without networks: logits by position, a witness of one, the answers of another."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import Fingerprint
from tasks.verify.reference import Probe, Reference
from tasks.verify.sampling import Settings
from tasks.verify.server import Entry, Generated, Scores, ServedModel, Server
from tasks.witness.plumbline_witness.prints import largest_steps

Array = NDArray[Any]


def logprobs_of(logits: Array) -> Array:
    """Return the log-softmax of logits, shape (N, V)."""
    shifted = logits - logits.max(1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return normalised


@dataclass(frozen=True)
class World:
    """Probes, and the logits (N, V) of a base and of a trained model at each of their positions."""

    probes: tuple[tuple[int, ...], ...]
    base: Array
    trained: Array

    def reference(self, top: int = 512, **facts: Any) -> Reference:
        """Return what a witness would hold."""
        trained = fingerprint(self.probes, self.trained, top)
        ids = trained.ids.astype(np.int64)
        base = np.take_along_axis(logprobs_of(self.base), ids, 1).astype(np.float32)
        probes = tuple(Probe(ids, "row", number) for number, ids in enumerate(self.probes))
        before = Fingerprint(
            self.probes, trained.ids, base, self.base.argmax(1).astype(np.int32), "trainer"
        )
        return Reference(probes, trained, before, facts)


def world(
    seed: int = 0, *, vocab: int = 800, count: int = 12, length: int = 20, moved: float = 0.3,
    spread: float = 3.0,
) -> World:  # fmt: skip
    """Return a world whose training moved each logit of a V of `vocab` by about `moved`.

    `count` probes have `length` tokens; `spread` is the standard deviation of the base's logits.
    """
    random = np.random.default_rng(seed)
    probes = tuple(tuple(map(int, random.integers(0, vocab, length))) for _ in range(count))
    size = (count * (length - 1), vocab)
    base = random.normal(0, spread, size)
    return World(probes, base, base + random.normal(0, moved, size))


NOISE = 0.02
"""Standard deviation of the difference of a logit between two correct engines."""


def noisy(logits: Array, seed: int, noise: float = NOISE) -> Array:
    """Return the logits of another correct engine."""
    return logits + np.random.default_rng(seed).normal(0, noise, logits.shape)


def fingerprint(probes: tuple[tuple[int, ...], ...], logits: Array, top: int = 512) -> Fingerprint:
    """Return a fingerprint at the most likely ids and each sequence's own next token."""
    logprobs = logprobs_of(logits)
    following = np.concatenate([probe[1:] for probe in probes]).astype(np.int64)
    ids = np.argsort(-logprobs, axis=1)[:, :top]
    missing = ~(ids == following[:, None]).any(1)
    ids[missing, -1] = following[missing]
    return Fingerprint(
        probes,
        ids.astype(np.int32),
        np.take_along_axis(logprobs, ids, 1).astype(np.float32),
        logprobs.argmax(1).astype(np.int32),
        "trainer",
        noise=1e-7,
        steps=largest_steps(logits.astype(np.float32)),
    )


def answers(probes: tuple[tuple[int, ...], ...], logits: Array, top: int = 20) -> list[Scores]:
    """Return what a server says: its `top` most likely ids and the sequence's own next token."""
    logprobs = logprobs_of(logits)
    scores: list[Scores] = []
    start = 0
    for probe in probes:
        entries = []
        for at, following in enumerate(probe[1:], start):
            best = np.argsort(-logprobs[at])[:top]
            best = best if following in best else np.append(best, following)
            entries.append(Entry(best.astype(np.int32), logprobs[at, best].astype(np.float32)))
        scores.append(entries)
        start += len(probe) - 1
    return scores


def write_witness(folder: Path, reference: Reference, **facts: Any) -> Path:
    """Write a record as `plumbline-witness` does. Returns the checkpoint's folder."""
    record = folder / "plumbline.witness"
    record.mkdir(parents=True)
    reference.trained.save(record / "fingerprint.fp")
    if reference.base is not None:
        reference.base.save(record / "base.fp")
    probes = [
        {"ids": probe.ids, "kind": probe.kind, "number": probe.number, "text": probe.text}
        for probe in reference.probes
    ]
    content = {"format": 1, "quantization": {"method": "none"}, "probes": probes}
    (record / "witness.json").write_text(json.dumps({**content, **reference.facts, **facts}))
    return folder


class ArrayServer(Server):
    """A server whose models are logits (N, V) by position of the same probes.

    It returns `top` ids per position; `sampling` are its default settings.
    """

    def __init__(
        self,
        probes: tuple[tuple[int, ...], ...],
        models: dict[str, Array],
        top: int = 20,
        sampling: Settings | None = None,
        seed: int = 0,
    ) -> None:
        self.url, self.kind, self.version = "http://localhost:8000", "array", ""
        self._probes, self._models, self._top = probes, models, top
        self._sampling = sampling or Settings()
        self._seed, self._lock = seed, threading.Lock()
        self._draws: Counter[int] = Counter()
        self.asked = 0

    def models(self) -> tuple[ServedModel, ...]:
        """Return all names."""
        return tuple(ServedModel(name) for name in self._models)

    def score(self, model: str, sequences: Any, workers: int = 0) -> list[Scores]:
        """Return the answers on the probes."""
        if not self._top:
            self._cannot("return log-probabilities")
        if not sequences:
            return []
        self.asked += 1
        assert tuple(map(tuple, sequences)) == self._probes
        return answers(self._probes, self._models[model], self._top)

    def generate(
        self, model: str, prompt: Any, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        """Sample one token after a part of a probe."""
        assert (count, more) == (1, {})
        start = 0
        for probe in self._probes:
            if probe[: len(prompt)] == tuple(prompt):
                break
            start += len(probe) - 1
        at = start + len(prompt) - 1
        row = logprobs_of(self._models[model][at : at + 1])[0]
        order = np.argsort(-row)
        p = self._sampling.probabilities(row[order])
        with self._lock:
            self._draws[start + len(prompt)] += 1
        draw = self._draws[start + len(prompt)]
        random = np.random.default_rng((self._seed, start + len(prompt), draw))
        tokens = order[random.choice(len(row), n, p=p[:-1])]
        return [Generated((int(token),), "", "length") for token in tokens]
