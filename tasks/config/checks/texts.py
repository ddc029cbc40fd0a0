"""Raw texts, as in pre-training: what goes with them, and what only goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.config.checks.finding import Finding
from tasks.data.kinds import TEXTS, names_texts

KEY = "data.text_key"


def fit(settings: Mapping[str, Any]) -> list[Finding]:
    """Raw texts are for sft, and every token of them is learnt; only they can be cut into pieces.

    Args:
        settings: the resolved configuration.
    """
    train, data = settings["train"], settings["data"]
    if not names_texts(data):
        if train["on_overlong"] != "split":
            return []
        allowed = "a piece of a conversation has lost its prompt; split is for raw texts"
        override = f"train.on_overlong=truncate or refuse, or {KEY}=<column>"
        return [Finding("train.on_overlong", f"split without {KEY}", allowed, override)]
    found = _sources(data)
    objective, mask = train["objective"], train["mask"]
    if objective not in TEXTS.objectives:
        what = f"raw texts with train.objective={objective}"
        found.append(
            Finding(KEY, what, "raw texts are for sft", f"{KEY}=null or train.objective=sft")
        )
    elif mask != "every_token":
        what, allowed = f"{mask} with {KEY}", "a raw text has no answers"
        found.append(Finding("train.mask", what, allowed, "train=pretrain"))
    if settings["gate"]["min_eval_gain"] is not None:
        what, allowed = f"with {KEY}", "a raw text is not answered right or wrong"
        found.append(Finding("gate.min_eval_gain", what, allowed, "gate.min_eval_gain=null"))
    return found


def _sources(data: Mapping[str, Any]) -> list[Finding]:
    """Where texts are to come from: from everywhere or from nowhere, and never from the toy."""
    if data["kind"] == "toy":
        override = "data.path=<file>"
        return [Finding(KEY, "data=toy", "it makes conversations", override)]
    allowed = "all sources hold raw texts, or none does"
    return [
        Finding(f"data.sources[{number}].text_key", "nothing", allowed, "text_key: <column>")
        for number, source in enumerate(data["sources"])
        if data["text_key"] is None and source["text_key"] is None
    ]
