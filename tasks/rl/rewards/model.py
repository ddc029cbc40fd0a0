"""`reward.model`: a reward model scores responses at their last token, in this process.

    reward = (score - mean) / std

with the model's own mean and std over held-out responses (`reward.normalize`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tasks.rl.experience.responses import Response
from tasks.rl.rewards.encoding import Encoding
from tasks.rl.rewards.folder import ROW_TOKENS, RewardFolder
from tasks.rl.rewards.sources import validate_rewards
from tasks.serving.reference.load import from_folder
from tasks.serving.reference.rewards import CLASSIFIER, normalised
from tasks.training.model.packed_model import accept_packed_rows
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.packing import pack
from tasks.weights.heads.normalisation import Normalisation


class RewardModel:
    """A reward model as a reward source.

    Args:
        label: name of the source in errors.
        encoding: turns responses into token ids.
        scorer: scores token ids.
        normalisation: of scores; None leaves them unchanged.
    """

    def __init__(
        self,
        label: str,
        *,
        encoding: Encoding,
        scorer: InProcess,
        normalisation: Normalisation | None,
    ) -> None:
        self.label = label
        self._encoding, self._scorer = encoding, scorer
        self._normalisation = normalisation or Normalisation()

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the reward of each response.

        Raises:
            RewardError: a text too long for the model, or a score that is not finite.
        """
        scores = self._scorer.scores(self._encoding.texts(responses))
        return normalised(validate_rewards(scores, responses, self.label), self._normalisation)

    def close(self) -> None:
        """Free the model's memory."""
        self._scorer.close()


class InProcess:
    """Scores in this process, on packed rows and without gradients.

    Args:
        folder: of the model.
        device: where the model computes.
        attn_implementation: as in transformers.

    Raises:
        ArtifactError: the folder cannot be loaded.
        ConfigError: sequences of this model family cannot be packed.
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
        accept_packed_rows(model)
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._device = device

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the head's output at the last token of each text."""
        examples = Examples.of_texts(texts)
        scores = np.empty(len(texts))
        with torch.no_grad():
            for chosen in _rows([len(text) for text in texts]):
                row = pack(examples, chosen).to(self._device)
                scores[chosen] = self._model(row=row).cpu().numpy()
        return [float(score) for score in scores]

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None


def _rows(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield numbers of texts row by row, sorted by length, up to `ROW_TOKENS` tokens each."""
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
