"""Scores of a reward model by transformers: one number per text, normalised as its files say.

    load_rewarder(folder, adapter=None, ...).scores(probes)

Texts run one at a time without padding; the score is the head's output at the last token. A
`*ForSequenceClassification` folder is loaded as that class. For other formats (OpenRLHF) the
backbone is loaded by transformers and the head is read from the files under its own name. Nothing
here uses the conversion that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.core.machine import measured_on
from tasks.serving.reference.load import from_folder, input_device, with_adapter
from tasks.weights.compute import full
from tasks.weights.files.documents import read_json
from tasks.weights.heads import (
    OUTPUT_EMBEDDINGS,
    SCORE,
    Normalisation,
    detect,
    normalisation_from,
    read_folder,
)

CLASSIFIER = "AutoModelForSequenceClassification"


@dataclass(frozen=True)
class Rewarder:
    """A loaded reward model."""

    # takes token ids (texts, tokens), returns the head's output for the first text
    score: Callable[[Any], Any]
    normalisation: Normalisation  # mean and std of the rewards
    model: Any  # the model, or its backbone

    @property
    def on(self) -> dict[str, str]:
        """`machine.measured_on` of the model."""
        return measured_on(input_device(self.model), self.model.config._attn_implementation)

    def scores(self, probes: Sequence[Sequence[int]], *, raw: bool = False) -> list[float]:
        """Return the reward of each text; `raw` skips the normalisation."""
        raw_scores = [self._raw(probe) for probe in probes]
        return raw_scores if raw else normalised(raw_scores, self.normalisation)

    def noise(self, probes: Sequence[Sequence[int]]) -> float:
        """Return the mean absolute difference of raw scores between two orders of summation."""
        from tasks.serving.reference.measure import COPIES, other_sums

        first = [self._raw(probe) for probe in probes]
        with other_sums(self.model):
            again = [self._raw(probe, COPIES) for probe in probes]
        return fmean(abs(a - b) for a, b in zip(first, again, strict=True))

    def _raw(self, probe: Sequence[int], copies: int = 1) -> float:
        import torch

        with torch.no_grad():
            return float(self.score(torch.tensor([list(probe)] * copies)).float())


def normalised(scores: Sequence[float], normalisation: Normalisation) -> list[float]:
    """Return (score - mean) / std, or the scores themselves without a normalisation."""
    mean, std = normalisation.mean or 0.0, 1.0 if normalisation.std is None else normalisation.std
    return [(score - mean) / std for score in scores]


def load_rewarder(path: Path, *, adapter: Path | None, **how: Any) -> Rewarder:
    """Load a reward model; with an adapter `path` is its base.

    The adapter has a reward head, or changes that of `path`; `how` are options of `from_folder`.
    Raises ArtifactError.
    """
    config = read_json(path / "config.json")
    name = (config.get("architectures") or [""])[0]
    if adapter is None and not name.endswith("ForSequenceClassification"):
        return _with_head(path, **how)
    if how.get("quantization") is not None:
        how["quantization"] = {**how["quantization"], "skip": ["score", "lm_head"]}
    gaps = () if adapter is None else (SCORE, *OUTPUT_EMBEDDINGS)
    model = from_folder(CLASSIFIER, path, num_labels=1, gaps=gaps, **how)
    if adapter is not None:
        # A base may pad with the token that ends a text, which would score one token too early.
        model.config.get_text_config().pad_token_id = None
        model = with_adapter(model, adapter)
        if (adapter / "config.json").is_file():
            config = read_json(adapter / "config.json")
    text = model.eval().config.get_text_config()
    if text.pad_token_id is None:  # transformers would refuse any batch, even of equal texts
        text.pad_token_id = -1

    def score(ids: Any) -> Any:
        return model(input_ids=ids.to(input_device(model))).logits[0, 0]

    return Rewarder(score, normalisation_from(config, "config.json"), model)


def _with_head(path: Path, **how: Any) -> Rewarder:
    """Return the rewarder of a backbone and the head that is stored beside it."""
    import torch
    from torch.nn.functional import linear

    detected = detect(read_folder(path))
    if detected.head is None:
        raise ArtifactError(f"{path}: no reward head in it", details=detected.findings)
    keys = [name.partition(":")[2] for name in detected.head.sources]
    buffers = [source.partition(":")[2] for source in detected.normalisation.buffers]
    gaps = (*keys, *buffers, *OUTPUT_EMBEDDINGS)
    backbone = from_folder("AutoModel", path, gaps=gaps, **how).eval()
    device, dtype = input_device(backbone), getattr(torch, how["dtype"])
    sources = detected.folder.sources
    tensors = [full(name, sources).to(device, dtype) for name in detected.head.sources]
    weight, bias = tensors[0], tensors[1] if detected.head.bias else None

    def score(ids: Any) -> Any:
        states = backbone(input_ids=ids.to(input_device(backbone))).last_hidden_state[:, -1]
        return linear(states.to(weight.device), weight, bias)[0, 0]

    return Rewarder(score, detected.normalisation, backbone)
