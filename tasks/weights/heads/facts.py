"""Facts of a family's `*ForSequenceClassification` class: its name and its tensors.

Imports transformers; call it through `tasks.weights.execute.worker`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.families.meta import read_config
from tasks.weights.plan.contracts import ModelFacts, model_facts

_NOT_OF_THE_MODEL = ("quantization_config", "auto_map", "mean", "std")


def reward_facts(
    config: Mapping[str, Any], dtype: str, disk: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[str, ModelFacts]:
    """Return the class name of a reward model of a family, and its facts with one label.

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
