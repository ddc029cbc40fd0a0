"""A reward model of any dialect as `*ForSequenceClassification` with one label.

The weights keep their keys, the head becomes `score.weight`, (1, hidden). A score is the head's
output at the last token, as before. What the class has no place for goes into config.json:

    mean, std           normalised reward = (score - mean) / std; both absent: the score itself.
                        A head's bias b, which `score` does not have, is in the mean: mean - b
    value_head_prefix   "score": with it OpenRLHF reads the same folder
    problem_type        "regression": vLLM then returns the score itself, not its sigmoid

vLLM normalises when it is told to: `PoolerConfig(logit_mean=mean, logit_sigma=std)`.

transformers takes the score at the last token that is not `pad_token_id`. Where a text's own last
token is the padding token (pad = eos) that is one token early; config.json then has no pad token:
transformers refuses to score batches, instead of scoring them wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.core.errors import ContractError
from tasks.weights.heads.detect import WRAPPER, Found, Head
from tasks.weights.heads.folder import HEAD
from tasks.weights.heads.normalisation import Normalisation, read_scalar
from tasks.weights.heads.split import require_head
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Dropped, Op, Plan

SCORE = "score.weight"
OUTPUT_EMBEDDINGS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
"""A language model's own head, by the names that the families give it."""


def plan_reward(found: Found, *, max_shard_bytes: int | None = None) -> Plan:
    """Plan the conversion of a whole reward model; inputs are the folder's sources.

    Raises:
        ContractError: no head, one that was not saved, one that is not one number, a critic; every
            finding in one error.
    """
    head = require_reward(found)
    score: list[Op] = []
    ops: list[Op] = []
    dropped: list[Dropped] = []
    for name, source in found.folder.sources.items():
        for op in as_is(source, name).ops:
            reason = _why_dropped(op, head, found.normalisation)
            if op.source == head.weight:
                score.append(replace(op, name=SCORE))
            elif reason:
                dropped.append(Dropped(op.source, reason))
            else:
                ops.append(replace(op, name=op.name.removeprefix(WRAPPER)))
    return Plan((*ops, *score), tuple(dropped), max_shard_bytes, {"head": head.weight})


def require_reward(found: Found) -> Head:
    """The head of a reward model. Raises ContractError."""
    head = require_head(found, stage="reward")
    if head.role == "value":
        raise ContractError(
            f"reward: {found.folder.root}: a critic: its head gives the value of every token, not "
            "the reward of a text",
            hint="source=<folder of the reward model, or of the policy>",
        )
    return head


def _why_dropped(op: Op, head: Head, normalisation: Normalisation) -> str:
    if op.source == head.bias:
        return "the head's bias: in config.json, as part of the mean"
    if op.source in normalisation.buffers:
        return f"in config.json: {op.key}"
    if op.input == HEAD:
        return "not the head"
    if op.key.removeprefix(WRAPPER) in OUTPUT_EMBEDDINGS:
        return "the language model's head: a reward model has none"
    return ""


def normalisation_of(found: Found) -> Normalisation:
    """How scores of the converted model are normalised. Raises ArtifactError."""
    if found.head is None or not found.head.bias:
        return found.normalisation
    name, _, key = found.head.bias.partition(":")
    return found.normalisation.with_bias(read_scalar(found.folder.sources[name], key))


def reward_config(
    config: Mapping[str, Any],
    architecture: str,
    normalisation: Normalisation,
    endings: Sequence[int] = (),
) -> dict[str, Any]:
    """config.json of the converted model.

    Args:
        config: of the model it was made from.
        architecture: the `*ForSequenceClassification` class of its family.
        normalisation: of its rewards.
        endings: ids that end a text. One of them must not be the padding token.
    """
    gone = ("quantization_config", "torch_dtype", "mean", "std", "num_labels", "auto_map")
    found: dict[str, Any] = {key: value for key, value in config.items() if key not in gone}
    found |= {
        "architectures": [architecture],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": "regression",
        "value_head_prefix": SCORE.partition(".")[0],
    }
    if normalisation.is_there:
        found |= {"mean": normalisation.mean, "std": normalisation.std, "normalize_reward": True}
    if found.get("pad_token_id") in endings:
        found["pad_token_id"] = None
    return found
