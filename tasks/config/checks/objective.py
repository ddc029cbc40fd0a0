"""The objective: the head that it needs, its mask, raw texts, reference answers."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from tasks.config.checks.data import PEEK
from tasks.config.checks.model import Known
from tasks.core.errors import DataError
from tasks.core.finding import Finding
from tasks.data.asked import asked
from tasks.data.columns import Columns
from tasks.data.kinds import TEXTS, names_texts
from tasks.data.messages import Unusable
from tasks.data.readers import FILE_KINDS, Row, read_rows
from tasks.rl.algorithms import algorithm_options
from tasks.rl.rewards.function import EXACT_MATCH
from tasks.training.memory.sizes import experts_of
from tasks.training.model.router_loss import OBJECTIVES as ROUTED
from tasks.training.model.router_loss import coefficient as router_coefficient
from tasks.training.model.router_loss import has_router_loss

_SOURCE = "transformers/models/auto/modeling_auto.py"
_TABLES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
TEXT_KEY = "data.text_key"


@cache
def families(auto_class: str) -> frozenset[str]:
    """Return the model types (`model_type` of config.json) that a class of transformers knows.

    The table is parsed as text, because importing transformers takes seconds.

    Args:
        auto_class: a key of `_TABLES`.

    Raises:
        LookupError: the installed transformers has no such table.
    """
    path = Path(str(distribution("transformers").locate_file(_SOURCE)))
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [name.id for name in getattr(node, "targets", ()) if isinstance(name, ast.Name)]
        if isinstance(node, ast.Assign) and _TABLES[auto_class] in names:
            (table,) = node.value.args  # type: ignore[attr-defined]  # OrderedDict([...])
            return frozenset(name for name, _ in ast.literal_eval(table))
    raise LookupError(f"{path} has no {_TABLES[auto_class]}")


def head_exists(objective: str, known: Known) -> list[Finding]:
    """Refuse an objective whose head the model's family does not have in transformers.

    Args:
        objective: `train.objective`.
        known: facts about the base model; a model with its own code (`auto_map`) is accepted.
    """
    config, rewards = known.config, objective == "reward"
    auto_class = "AutoModelForSequenceClassification" if rewards else "AutoModelForCausalLM"
    family = config.get("model_type")
    if family is None or auto_class in (config.get("auto_map") or {}):
        return []
    why = _no_decoder(config)
    able = families(auto_class)
    if not rewards and "text_config" in config:  # a vision-language model, trained on text
        able |= families("AutoModelForImageTextToText")
    if why is None and family not in able:
        here = f"transformers {version('transformers')}"
        head = "score head (...ForSequenceClassification)" if rewards else "causal language model"
        why = f"{here} has no {head} for {family}"
    if why is None:
        return []
    override = "model.path=<a causal language model>"
    if rewards and family in families("AutoModelForCausalLM"):
        override += " of another family, or train.objective=dpo"
    return [Finding("train.objective", f"{objective} on {family}", why, override)]


def router_loss(train: Mapping[str, Any], known: Known) -> list[Finding]:
    """Refuse a router loss that the objective, the family or the checkpointing does not have.

    Args:
        train: the section.
        known: facts about the base model.
    """
    text = known.config.get("text_config") or known.config
    family, wanted = str(text.get("model_type", "")), train["router_aux_loss_coef"]
    key, without = "train.router_aux_loss_coef", "train.router_aux_loss_coef=0"
    if wanted and text and experts_of(text) <= 1:
        value, allowed = f"{wanted:g} with {family}", "only a mixture of experts has routers"
        return [Finding(key, value, allowed, "train.router_aux_loss_coef=null")]
    weight = router_coefficient(known.config, wanted)
    if not weight:
        return []
    value = f"{weight:g}" if wanted is not None else f"{weight:g}, from config.json"
    problems = []
    if train["objective"] not in ROUTED:
        allowed = f"train.objective={train['objective']} has no router loss: {', '.join(ROUTED)} do"
        problems.append((f"{value} with {family}", allowed, without))
    if not has_router_loss(family):
        allowed = f"transformers {version('transformers')} has no such loss for {family}"
        problems.append((value, allowed, without))
    if train["gradient_checkpointing"] and train["gradient_checkpointing_reentrant"]:
        allowed = "reentrant checkpointing loses the gradient of the routers' outputs"
        override = f"train.gradient_checkpointing_reentrant=false or {without}"
        problems.append((value, allowed, override))
    return [Finding(key, *problem) for problem in problems]


def _no_decoder(config: Mapping[str, object]) -> str | None:
    """Return why the model is not a decoder that predicts the next token; None if it is one."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder with a decoder; only decoders are trained here"
    names = config.get("architectures")
    classes = names if isinstance(names, list) else []
    if classes and all(str(name).endswith("ForMaskedLM") for name in classes):
        return f"{classes[0]} predicts masked tokens, not the next one"
    return None


def objective_fits(objective: str, known: Known) -> list[Finding]:
    """Refuse a reward model as a base, except for another reward model with one label.

    Args:
        objective: `train.objective`.
        known: facts about the base model.
    """
    if known.score is None:
        return []
    if objective != "reward":
        value = f"{objective} on a base with a score head"
        override = "train=reward, or model.path=<a causal language model>"
        return [Finding("train.objective", value, "it has no head for tokens", override)]
    if known.score[0] != 1:
        value = f"a score head of {known.score[0]} labels"
        allowed = "a reward is one number: one label, or no score head"
        return [Finding("model.path", value, allowed, "model.path=<a causal language model>")]
    return []


def mask_fits(mask: str, objective: str) -> list[Finding]:
    """Refuse every_token for objectives other than sft, which learn from answers."""
    if mask != "every_token" or objective == "sft":
        return []
    value, allowed = f"{mask} with train.objective={objective}", "it is for sft"
    return [Finding("train.mask", value, allowed, "train.mask=every_answer")]


def raw_texts(settings: Mapping[str, Any]) -> list[Finding]:
    """Check that raw texts are trained with sft on every token, and that only they are split.

    Args:
        settings: the resolved configuration.
    """
    train, data = settings["train"], settings["data"]
    if not names_texts(data):
        if train["on_overlong"] != "split":
            return []
        allowed = "a piece of a conversation has lost its prompt; split is for raw texts"
        override = f"train.on_overlong=truncate or refuse, or {TEXT_KEY}=<column>"
        return [Finding("train.on_overlong", f"split without {TEXT_KEY}", allowed, override)]
    findings = _text_sources(data)
    objective, mask = train["objective"], train["mask"]
    if objective not in TEXTS.objectives:
        value = f"raw texts with train.objective={objective}"
        override = f"{TEXT_KEY}=null or train.objective=sft"
        findings.append(Finding(TEXT_KEY, value, "raw texts are for sft", override))
    elif mask != "every_token":
        value, allowed = f"{mask} with {TEXT_KEY}", "a raw text has no answers"
        findings.append(Finding("train.mask", value, allowed, "train=pretrain"))
    if settings["gate"]["min_eval_gain"] is not None:
        value, allowed = f"with {TEXT_KEY}", "a raw text is not answered right or wrong"
        findings.append(Finding("gate.min_eval_gain", value, allowed, "gate.min_eval_gain=null"))
    return findings


def _text_sources(data: Mapping[str, Any]) -> list[Finding]:
    """Refuse the embedded tasks as raw texts, and sources of which only some hold raw texts."""
    if data["kind"] == "toy":
        override = "data.path=<file>"
        return [Finding(TEXT_KEY, "data=toy", "it makes conversations", override)]
    allowed = "all sources hold raw texts, or none does"
    return [
        Finding(f"data.sources[{number}].text_key", "nothing", allowed, "text_key: <column>")
        for number, source in enumerate(data["sources"])
        if data["text_key"] is None and source["text_key"] is None
    ]


def reference_answers(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield files without a reference answer in their first rows, if exact_match is the reward.

    A single row without an answer, further down, is reported by `prepare`, with its line.

    Args:
        settings: the resolved configuration.
    """
    online = settings["train"]["objective"] in algorithm_options.TERMS
    if not online or settings["reward"]["function"] != EXACT_MATCH:
        return
    for path, section in _files(settings["data"]):
        columns = Columns.of({k: v for k, v in section.items() if k.endswith("_key")})
        try:
            rows = list(itertools.islice(read_rows(section["kind"], path), PEEK))
        except DataError:
            continue  # other checks report it, and rows without a prompt
        answered = list(_have_answers(rows, columns))
        if answered and not any(answered):
            names = list(dict.fromkeys(name for row in rows for name in row.values))
            yield Finding(
                "reward.function",
                f"{EXACT_MATCH}, and none of the first {len(answered)} rows of {path} "
                "has an answer",
                f"a column {columns.answer!r}, or a conversation that ends with the answer; "
                f"the columns are {', '.join(names)}",
                "data.answer_key=<column>, or reward.function=<path.py>:<name>",
            )


def _files(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path of every data file, and the section that says how to read it."""
    for source in data["sources"]:
        named = {k: v for k, v in source.items() if v is not None and k.endswith(("_key", "kind"))}
        section = {**data, **named}
        if section["kind"] in FILE_KINDS and source["path"]:
            yield source["path"], section
    if data["kind"] in FILE_KINDS:
        for key in ("path", "eval_path"):
            if data[key]:
                yield data[key], data


def _have_answers(rows: list[Row], columns: Columns) -> Iterator[bool]:
    for row in rows:
        try:
            if not row.problem:
                yield "answer" in asked(row.values, columns.among(row.values))
        except Unusable:
            continue
