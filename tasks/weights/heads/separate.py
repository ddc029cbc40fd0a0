"""What becomes of a folder with a head: one plan for what is served, and what it needs beside it.

    found = detect(read_folder(source))
    parted = separate(found, dtype="bfloat16", perform=perform)
    validate(parted.plan, parted.sources)
    execute(parted.plan, parted.sources, out)        # and parted.config as its config.json
    if parted.value_head: write_value_head(found, elsewhere)

A reward model becomes `*ForSequenceClassification`; a policy loses its value head. Where the files
do not tell which of the two a `v_head` is for (`Head.role` "either"), it is a policy's value head,
unless `reward` says otherwise.
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
from tasks.weights.files.tokenizer import read_tokenizer
from tasks.weights.heads.detect import Found
from tasks.weights.heads.reward import normalisation_of, plan_reward, require_reward, reward_config
from tasks.weights.heads.split import plan_policy, policy_sources, require_head
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Plan

_SHOWN = 50


@dataclass(frozen=True)
class Parted:
    """A folder's model without what is not to be served.

    Attributes:
        plan: of the served model; inputs are `sources`.
        sources: inputs by name.
        config: its config.json.
        facts: of the served model; None for an adapter, which has no model of its own.
        value_head: whether there is a value head to be kept, by `write_value_head`.
    """

    plan: Plan
    sources: Mapping[str, Source]
    config: Mapping[str, Any]
    facts: ModelFacts | None
    value_head: bool


def separate(
    found: Found,
    *,
    dtype: str,
    reward: bool | None = None,
    max_shard_bytes: int | None = None,
    perform: Perform = perform,
) -> Parted:
    """Plan it. Nothing is written.

    Args:
        found: what `detect` said.
        dtype: torch name of the served model's dtype, for its facts; tensors keep their own.
        reward: whether it is a reward model; None goes by the head.
        max_shard_bytes: of tensor data in one file.
        perform: who knows the model classes.

    Raises:
        ContractError: no head, or one that cannot be used; tensors that the class does not have.
        ArtifactError: the family has no such class.
    """
    head = require_head(found, stage="heads")
    if reward if reward is not None else head.role == "reward":
        return _reward(found, dtype, max_shard_bytes, perform)
    if head.dialect != "trl" and head.dialect != "llamafactory":
        raise ContractError(
            f"{found.folder.root}: {head.weight} sits on a backbone that was trained for it alone: "
            f"a {'critic' if head.role == 'value' else 'reward model'}, no policy",
            hint="source=<folder of the policy>: a critic is of use to go on training alone",
        )
    sources = policy_sources(found)
    plan = plan_policy(found, max_shard_bytes=max_shard_bytes)
    facts = None
    if found.folder.adapter_config is None:
        disk = {op.name: op.shape for op in plan.ops}
        facts = ask_facts(perform, found.folder.root, dtype, disk)
        _require_fit(facts, plan, f"split: {found.folder.root} without its head")
    return Parted(plan, sources, dict(found.folder.config), facts, value_head=True)


def _reward(found: Found, dtype: str, max_shard_bytes: int | None, perform: Perform) -> Parted:
    require_reward(found)
    if found.folder.adapter_config is not None:
        raise ContractError(
            f"{found.folder.root}: the adapter of a reward model: it is merged into its base first",
            hint="base=<folder of its base model>",
        )
    plan = plan_reward(found, max_shard_bytes=max_shard_bytes)
    disk = {op.name: op.shape for op in plan.ops}
    config, root = found.folder.config, found.folder.root
    name, facts = ask_reward_facts(perform, config, dtype, disk)
    _require_fit(facts, plan, f"reward: {root} is no {name}")
    document = reward_config(config, name, normalisation_of(found), endings(root))
    return Parted(plan, found.folder.sources, document, facts, value_head=False)


def endings(root: Path) -> list[int]:
    """Ids that end a text, as far as there is a tokenizer."""
    return read_tokenizer(root).stops if (root / "tokenizer.json").is_file() else []


def _require_fit(facts: ModelFacts, plan: Plan, what: str) -> None:
    """What the class says of keys and shapes, and numbers of a kind that it does not have."""
    found = {op.name: op for op in plan.ops}
    findings = [*facts.findings]
    findings += [
        f"{one.name}: {describe(one.shape, one.dtype)} wanted, found {found[one.name].dtype}"
        for one in facts.tensors
        if one.dtype is not None and is_float(one.dtype) and one.name in found
        if not is_float(found[one.name].dtype)
    ]
    if findings:
        raise ContractError(f"{what}: {first_and_more(findings)}", details=findings[:_SHOWN])
