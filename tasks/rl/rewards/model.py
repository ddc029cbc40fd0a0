"""`reward.model`: a reward model scores every reply at its last token, in this process or in vLLM.

    reward = (score - mean) / std

with the model's own mean and deviation over held-out answers (`reward.normalize`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tasks.core.errors import ArtifactError
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards.encoding import Encoding
from tasks.rl.rewards.folder import ROW_TOKENS, RewardFolder
from tasks.rl.rewards.sources import checked
from tasks.serving.reference.load import from_folder
from tasks.serving.reference.rewards import CLASSIFIER, normalised
from tasks.training.model.packed_model import take_rows
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.packing import pack
from tasks.weights.heads.normalisation import Normalisation


class Scorer(Protocol):
    """Who computes scores."""

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The head's output at the last token of each text, not normalised."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


class RewardModel:
    """A reward model as a source of rewards.

    Args:
        who: the source, for errors.
        encoding: of replies.
        scorer: of texts.
        normalisation: of scores; None takes them as they are.
    """

    def __init__(
        self, who: str, *, encoding: Encoding, scorer: Scorer, normalisation: Normalisation | None
    ) -> None:
        self.who = who
        self._encoding, self._scorer = encoding, scorer
        self._normalisation = normalisation or Normalisation()

    def __call__(self, replies: Sequence[Reply]) -> list[float]:
        """The reward of each reply.

        Raises:
            RewardError: a text too long for the model, or a score that is not finite.
        """
        scores = self._scorer.scores(self._encoding.texts(replies))
        return normalised(checked(scores, replies, self.who), self._normalisation)

    def close(self) -> None:
        """Free the model's memory."""
        self._scorer.close()


class InProcess:
    """Scores in this process, on packed rows and without gradient.

    Args:
        folder: of the model.
        device: where it computes.
        attn_implementation: as in transformers.

    Raises:
        ArtifactError: the folder cannot be loaded.
        ConfigError: a family whose sequences cannot be packed.
    """

    def __init__(
        self, folder: RewardFolder, *, device: torch.device, attn_implementation: str = "sdpa"
    ) -> None:
        model = from_folder(
            CLASSIFIER,
            folder.path,
            dtype=folder.dtype,
            attn_implementation=attn_implementation,
            device_map=None if device.type == "cpu" else {"": str(device)},
            num_labels=1,
        )
        take_rows(model)
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._device = device

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The head's output at the last token of each text."""
        examples = _examples(texts)
        found = np.empty(len(texts))
        with torch.no_grad():
            for chosen in _rows([len(text) for text in texts]):
                row = pack(examples, chosen).to(self._device)
                found[chosen] = self._model(row=row).cpu().numpy()
        return [float(score) for score in found]

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None


def in_vllm(folder: RewardFolder, *, longest: int | None) -> Scorer:
    """vLLM beside this rank.

    Args:
        folder: of the model.
        longest: text, in tokens.

    Raises:
        ArtifactError: nothing says how long a text may be.
    """
    from tasks.serving.vllm.reward_engine import Pooling, RewardEngine

    if longest is None:
        raise ArtifactError(
            f"reward.model={folder.path}: config.json has no max_position_embeddings",
            hint="reward.engine=process",
        )
    return RewardEngine(Pooling(folder.path, max_model_len=longest, dtype=folder.dtype))


def _examples(texts: Sequence[Sequence[int]]) -> Examples:
    ids = np.concatenate([np.asarray(text, np.int32) for text in texts])
    bounds = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    names = [str(number) for number in range(len(texts))]
    return Examples(("text",), names, ids, np.zeros(len(ids), np.uint8), bounds, {})


def _rows(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts row by row: those of like length together, as many as fit."""
    row: list[int] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if row and tokens + lengths[number] > ROW_TOKENS:
            yield row
            row, tokens = [], 0
        row.append(number)
        tokens += lengths[number]
    if row:
        yield row
