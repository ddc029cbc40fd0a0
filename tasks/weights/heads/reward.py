"""Convert a reward model of any dialect to `*ForSequenceClassification` with one label.

The weights keep their keys; the head becomes `score.weight`, (1, hidden). A score is the head's
output at the last token, as before. config.json stores the settings that have no tensor:

    mean, std           normalised reward = (score - mean) / std; without them, the score itself.
                        `score` has no bias, so a head's bias b goes into the mean: mean - b
    value_head_prefix   "score", so that OpenRLHF can read the same folder
    problem_type        "regression", so that vLLM returns the score and not its sigmoid

vLLM normalises only with `PoolerConfig(logit_mean=mean, logit_sigma=std)`.

transformers takes the score at the last token that is not `pad_token_id`. If the padding token also
ends texts (pad = eos), this is one token too early. config.json then gets no padding token, so that
transformers refuses to score batches instead of scoring them wrongly.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.families.meta import read_config
from tasks.weights.heads.detect import WRAPPER, Found, Head
from tasks.weights.heads.folder import HEAD
from tasks.weights.heads.normalisation import Normalisation, read_scalar
from tasks.weights.heads.split import require_head
from tasks.weights.plan.contracts import ModelFacts, model_facts
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Dropped, Op, Plan

SCORE = "score.weight"
OUTPUT_EMBEDDINGS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
"""Keys of the LM head of a language model."""


def plan_reward(detected: Found) -> Plan:
    """Plan the conversion of a full reward model; inputs are the folder's sources.

    Raises:
        ContractError: lists every finding: no head, more than one label, a critic.
    """
    head = require_reward(detected)
    score: list[Op] = []
    ops: list[Op] = []
    dropped: list[Dropped] = []
    for name, source in detected.folder.sources.items():
        for op in as_is(source, name).ops:
            reason = _why_dropped(op, head, detected.normalisation)
            if op.source == head.weight:
                score.append(replace(op, name=SCORE))
            elif reason:
                dropped.append(Dropped(op.source, reason))
            else:
                ops.append(replace(op, name=op.name.removeprefix(WRAPPER)))
    return Plan((*ops, *score), tuple(dropped), notes={"head": head.weight})


def require_reward(detected: Found) -> Head:
    """Return the head of a reward model. Raises ContractError if there is none."""
    head = require_head(detected, stage="reward")
    if head.role == "value":
        raise ContractError(
            f"reward: {detected.folder.root}: a critic: its head gives the value of every token, "
            "not the reward of a text",
            hint="source=<folder of the reward model, or of the policy>",
        )
    return head


def _why_dropped(op: Op, head: Head, normalisation: Normalisation) -> str:
    if op.source == head.bias:
        return "the head's bias: stored in config.json, as part of the mean"
    if op.source in normalisation.buffers:
        return f"stored in config.json: {op.key}"
    if op.input == HEAD:
        return "not the head"
    if op.key.removeprefix(WRAPPER) in OUTPUT_EMBEDDINGS:
        return "the language model's head: a reward model has none"
    return ""


def normalisation_of(detected: Found) -> Normalisation:
    """Return the normalisation of the converted model's scores. Raises ArtifactError."""
    if detected.head is None or not detected.head.bias:
        return detected.normalisation
    name, _, key = detected.head.bias.partition(":")
    return detected.normalisation.with_bias(read_scalar(detected.folder.sources[name], key))


def reward_config(
    config: Mapping[str, Any],
    architecture: str,
    normalisation: Normalisation,
    endings: Sequence[int] = (),
) -> dict[str, Any]:
    """Return config.json of the converted model.

    Args:
        config: config.json of the original model.
        architecture: the `*ForSequenceClassification` class of its family.
        normalisation: normalisation of its rewards.
        endings: ids that end a text; a padding token among them is removed.
    """
    gone = ("quantization_config", "torch_dtype", "mean", "std", "num_labels", "auto_map")
    document: dict[str, Any] = {key: value for key, value in config.items() if key not in gone}
    document |= {
        "architectures": [architecture],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": "regression",
        "value_head_prefix": SCORE.partition(".")[0],
    }
    if normalisation.is_there:
        document |= {"mean": normalisation.mean, "std": normalisation.std, "normalize_reward": True}
    if document.get("pad_token_id") in endings:
        document["pad_token_id"] = None
    return document


_NOT_OF_THE_MODEL = ("quantization_config", "auto_map", "mean", "std")


def reward_facts(
    config: Mapping[str, Any], dtype: str, disk: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[str, ModelFacts]:
    """Return the class name of a reward model of a family, and its facts with one label.

    Imports transformers; call it through `tasks.weights.execute.worker`.

    Args:
        config: config.json of any model of the family, with any head.
        dtype: torch name of the dtype of the parameters.
        disk: shape of every tensor of the checkpoint, by key; None for the layout of
            `save_pretrained`.

    Raises:
        ArtifactError: the family has no such class, or config.json describes no usable model.
    """
    plain = {key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL}
    plain |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(plain))
        name = _class_name(Path(folder))
        path.write_text(json.dumps({**plain, "architectures": [name]}))
        return name, model_facts(Path(folder), dtype, disk)


def _class_name(folder: Path) -> str:
    from transformers import AutoModelForSequenceClassification

    config = read_config(folder)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ArtifactError(
            f"transformers has no {config.model_type} model for sequence classification, so a "
            "reward model of that family cannot be served"
        )
    return str(AutoModelForSequenceClassification._model_mapping[type(config)].__name__)
