"""Plan the model to serve from a folder with a head: a reward model, or a policy without its head.

    detected = detect(read_folder(source))
    parted = separate(detected, dtype="bfloat16", perform=perform)
    validate(parted.plan, parted.sources)
    execute(parted.plan, parted.sources, out)        # and parted.config as its config.json
    if parted.value_head: write_value_head(detected, elsewhere)

A reward model becomes `*ForSequenceClassification`; a policy loses its value head. A `v_head` whose
purpose the files do not tell (`Head.role` "either") counts as a value head, unless `reward` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.contract import describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.execute.worker import Perform, ask_facts, ask_reward_facts, perform
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.source import Source
from tasks.weights.heads.detect import Found
from tasks.weights.heads.reward import normalisation_of, plan_reward, require_reward, reward_config
from tasks.weights.heads.split import plan_policy, policy_sources, require_head
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Plan
from tasks.weights.tokens.tokenizer import read_tokenizer

_SHOWN = 50


@dataclass(frozen=True)
class Parted:
    """The plan of a model to serve, and the files beside its weights.

    Attributes:
        plan: plan of the served model; its inputs are `sources`.
        sources: inputs by name.
        config: config.json of the served model.
        facts: facts of the served model; None for an adapter.
        value_head: True if there is a value head to store with `write_value_head`.
    """

    plan: Plan
    sources: Mapping[str, Source]
    config: Mapping[str, Any]
    facts: ModelFacts | None
    value_head: bool


def separate(
    detected: Found,
    *,
    dtype: str,
    reward: bool | None = None,
    perform: Perform = perform,
) -> Parted:
    """Plan the model to serve. Nothing is written.

    Args:
        detected: result of `detect`.
        dtype: torch name of the dtype of the model's facts; tensors keep their own dtype.
        reward: True for a reward model, False for a policy; None decides by the head's role.
        perform: runs requests that need transformers.

    Raises:
        ContractError: no usable head, or tensors that the model's class does not have.
        ArtifactError: the family has no class for sequence classification.
    """
    head = require_head(detected, stage="heads")
    if reward if reward is not None else head.role == "reward":
        return _reward(detected, dtype, perform)
    if head.dialect != "trl" and head.dialect != "llamafactory":
        raise ContractError(
            f"{detected.folder.root}: {head.weight} is the head of a "
            f"{'critic' if head.role == 'value' else 'reward model'}, not of a policy",
            hint="source=<folder of the policy>: a critic is useful only to resume training",
        )
    sources = policy_sources(detected)
    plan = plan_policy(detected)
    facts = None
    if detected.folder.adapter_config is None:
        disk = {op.name: op.shape for op in plan.ops}
        facts = ask_facts(perform, detected.folder.root, dtype, disk)
        _require_fit(facts, plan, f"split: {detected.folder.root} without its head")
    return Parted(plan, sources, dict(detected.folder.config), facts, value_head=True)


def _reward(detected: Found, dtype: str, perform: Perform) -> Parted:
    require_reward(detected)
    if detected.folder.adapter_config is not None:
        raise ContractError(
            f"{detected.folder.root}: the adapter of a reward model: merge it into its base first",
            hint="base=<folder of its base model>",
        )
    plan = plan_reward(detected)
    disk = {op.name: op.shape for op in plan.ops}
    config, root = detected.folder.config, detected.folder.root
    name, facts = ask_reward_facts(perform, config, dtype, disk)
    _require_fit(facts, plan, f"reward: {root} is not a {name}")
    document = reward_config(config, name, normalisation_of(detected), endings(root))
    return Parted(plan, detected.folder.sources, document, facts, value_head=False)


def endings(root: Path) -> list[int]:
    """Return the ids that end a text; empty if the folder has no tokenizer."""
    return read_tokenizer(root).stops if (root / "tokenizer.json").is_file() else []


def _require_fit(facts: ModelFacts, plan: Plan, what: str) -> None:
    """Refuse a plan whose keys, shapes or kind of dtype do not fit the model's class."""
    ops = {op.name: op for op in plan.ops}
    findings = [*facts.findings]
    findings += [
        f"{tensor.name}: must be {describe(tensor.shape, tensor.dtype)}, "
        f"is {ops[tensor.name].dtype}"
        for tensor in facts.tensors
        if tensor.dtype is not None and is_float(tensor.dtype) and tensor.name in ops
        if not is_float(ops[tensor.name].dtype)
    ]
    if findings:
        raise ContractError(f"{what}: {first_and_more(findings)}", details=findings[:_SHOWN])
