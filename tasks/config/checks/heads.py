"""Whether the base's family has a class with the head that an objective needs.

transformers says so in a table of its own. It is read as text: importing it takes seconds.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

from tasks.config.checks.finding import Finding
from tasks.config.checks.model import Known

_SOURCE = "transformers/models/auto/modeling_auto.py"
_TABLES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


@cache
def families(auto_class: str) -> frozenset[str]:
    """Model types (`model_type` of config.json) that a class of transformers' knows.

    Args:
        auto_class: `AutoModelForCausalLM` or `AutoModelForSequenceClassification`.

    Raises:
        LookupError: the installed transformers keeps its table elsewhere.
    """
    path = Path(str(distribution("transformers").locate_file(_SOURCE)))
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [one.id for one in getattr(node, "targets", ()) if isinstance(one, ast.Name)]
        if isinstance(node, ast.Assign) and _TABLES[auto_class] in names:
            (table,) = node.value.args  # type: ignore[attr-defined]  # OrderedDict([...])
            return frozenset(name for name, _ in ast.literal_eval(table))
    raise LookupError(f"{path} has no {_TABLES[auto_class]}")


def head_exists(objective: str, known: Known) -> list[Finding]:
    """An objective that a model of this kind cannot have.

    Args:
        objective: `train.objective`.
        known: of the model; its own code (`auto_map`) is taken at its word.
    """
    config, rewards = known.config, objective == "reward"
    auto_class = "AutoModelForSequenceClassification" if rewards else "AutoModelForCausalLM"
    family = config.get("model_type")
    if family is None or auto_class in (config.get("auto_map") or {}):
        return []
    why = _no_decoder(config)
    if why is None and family not in families(auto_class):
        here = f"transformers {version('transformers')}"
        head = "score head (...ForSequenceClassification)" if rewards else "causal language model"
        why = f"{here} has no {head} for {family}"
    if why is None:
        return []
    override = "model.path=<a causal language model>"
    if rewards and family in families("AutoModelForCausalLM"):
        override += " of another family, or train.objective=dpo"
    return [Finding("train.objective", f"{objective} on {family}", why, override)]


def _no_decoder(config: dict[str, object]) -> str | None:
    """Why these weights foretell no next token, though their family may have a class for it."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder with a decoder; training here is of decoders alone"
    said = config.get("architectures")
    classes = said if isinstance(said, list) else []
    if classes and all(str(one).endswith("ForMaskedLM") for one in classes):
        return f"{classes[0]} sees what comes after a token, and fills gaps"
    return None
