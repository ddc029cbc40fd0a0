"""What transformers says of a reward model: one number for a text, normalised as its files say.

    load_rewarder(folder, adapter=None, ...).scores(probes)

A text at a time and without padding: the score is the head's output at the text's last token.
A `*ForSequenceClassification` folder is loaded as that class. One of another dialect (OpenRLHF) has
no class of its own in transformers: its backbone is, and the head is taken from the files, by its
own name: nothing here goes through the conversion that it is to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import ArtifactError
from tasks.serving.load import from_folder
from tasks.serving.peft_adapters import with_adapters
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import read_folder
from tasks.weights.heads.normalisation import Normalisation, normalisation_from
from tasks.weights.heads.reward import OUTPUT_EMBEDDINGS, SCORE
from tasks.weights.reader import read_json

CLASSIFIER = "AutoModelForSequenceClassification"


@dataclass(frozen=True)
class Rewarder:
    """A loaded reward model.

    Attributes:
        score: token ids of a text, (1, tokens) -> the head's output, one number.
        normalisation: of the rewards.
    """

    score: Callable[[Any], Any]
    normalisation: Normalisation

    def scores(self, probes: Sequence[Sequence[int]], *, raw: bool = False) -> list[float]:
        """The reward of each text; `raw` leaves out the normalisation."""
        import torch

        with torch.no_grad():
            found = [float(self.score(torch.tensor([list(probe)])).float()) for probe in probes]
        return found if raw else normalised(found, self.normalisation)


def normalised(scores: Sequence[float], how: Normalisation) -> list[float]:
    """(score - mean) / std; the scores themselves where there is no normalisation."""
    mean, std = how.mean or 0.0, 1.0 if how.std is None else how.std
    return [(score - mean) / std for score in scores]


def load_rewarder(path: Path, *, adapter: Path | None, **how: Any) -> Rewarder:
    """Load a reward model.

    Args:
        path: the model; the base where there is an adapter.
        adapter: PEFT folder that brings the head, or changes that of `path`.
        how: dtype, attn_implementation and quantization, as of `load.load_model`.

    Raises:
        ArtifactError: a folder that cannot be loaded, or holds no reward head.
    """
    config = read_json(path / "config.json")
    if adapter is not None:
        beside = adapter / "config.json"
        said = read_json(beside) if beside.is_file() else config
        model = _classifier(path, gaps=(SCORE, *OUTPUT_EMBEDDINGS), **how)
        return Rewarder(_logit(with_adapters(model, {str(adapter): 1.0})), _normalisation(said))
    names = config.get("architectures") or [""]
    if names[0].endswith("ForSequenceClassification"):
        return Rewarder(_logit(_classifier(path, **how)), _normalisation(config))
    return _with_head(path, **how)


def _classifier(path: Path, **how: Any) -> Any:
    if how.get("quantization") is not None:
        how["quantization"] = {**how["quantization"], "skip": ["score", "lm_head"]}
    return from_folder(CLASSIFIER, path, num_labels=1, **how)


def _logit(model: Any) -> Callable[[Any], Any]:
    model.eval()
    return lambda ids: model(input_ids=ids).logits[0, 0]


def _normalisation(config: Mapping[str, Any]) -> Normalisation:
    found, findings = normalisation_from(config)
    if findings:
        raise ArtifactError(f"config.json: {findings[0]}", details=findings)
    return found


def _with_head(path: Path, **how: Any) -> Rewarder:
    """The family's backbone, and the head that lies beside it in the files."""
    import torch
    from torch.nn.functional import linear

    found = detect(read_folder(path))
    if found.head is None:
        raise ArtifactError(f"{path}: no reward head in it", details=found.findings)
    keys = [source.partition(":")[2] for source in found.head.sources]
    beside = [source.partition(":")[2] for source in found.normalisation.buffers]
    gaps = (*keys, *beside, *OUTPUT_EMBEDDINGS)
    backbone = from_folder("AutoModel", path, gaps=gaps, **how).eval()
    tensors = {key: _tensor(path, key).to(getattr(torch, how["dtype"])) for key in keys}
    weight, bias = tensors[keys[0]], tensors.get(keys[-1]) if found.head.bias else None

    def score(ids: Any) -> Any:
        return linear(backbone(input_ids=ids).last_hidden_state[:, -1], weight, bias)[0, 0]

    return Rewarder(score, found.normalisation)


def _tensor(path: Path, key: str) -> Any:
    """A tensor of a model's files, read by safetensors or by torch."""
    import torch
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if key in opened.keys():  # noqa: SIM118
                return opened.get_tensor(key)
    for file in sorted(path.glob("*.bin")):
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if key in state:
            return state[key]
    raise ArtifactError(f"{path}: no file holds {key}")
