"""Models without networks: logits by position, a witness of one, the answers of another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import Fingerprint, largest_steps
from tasks.verify.reference import Probe, Reference
from tasks.verify.servers.server import Scores

Array = NDArray[Any]


def logprobs_of(logits: Array) -> Array:
    """Return the log-softmax of logits, shape (N, V)."""
    shifted = logits - logits.max(1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return normalised


@dataclass(frozen=True)
class World:
    """Probes, and the logits of a base and of a trained model at each of their positions.

    Attributes:
        probes: token ids.
        base: logits of the base, shape (N, V).
        trained: logits of the trained model, shape (N, V).
    """

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
    """Return a world whose training moved each logit by about `moved`.

    Args:
        seed: of the random numbers.
        vocab: V.
        count: number of probes.
        length: tokens of a probe.
        moved: standard deviation of the adapter's change of a logit.
        spread: standard deviation of the base's logits.
    """
    random = np.random.default_rng(seed)
    probes = tuple(tuple(map(int, random.integers(0, vocab, length))) for _ in range(count))
    size = (count * (length - 1), vocab)
    base = random.normal(0, spread, size)
    return World(probes, base, base + random.normal(0, moved, size))


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
    scores, start = [], 0
    for probe in probes:
        ids, values = [], []
        for at, following in enumerate(probe[1:], start):
            best = np.argsort(-logprobs[at])[:top]
            best = best if following in best else np.append(best, following)
            ids.append(best.astype(np.int32))
            values.append(logprobs[at, best].astype(np.float32))
        scores.append(Scores(tuple(ids), tuple(values)))
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
