"""Plan a merge of adapters into a base: one operation per tensor on disk.

    plan = plan_merge(base.tensors, facts, changes(adapters, facts.live), operands)

Keys, shapes and order of the output are those of the base checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.contract import TensorLike
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.adapters.changes import Changes
from tasks.weights.families.merge_ops import MergeOps, MergeSettings
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Dropped, Plan
from tasks.weights.tokens.vocabulary import resized_config

__all__ = ["MergeSettings", "merged_config", "plan_merge"]

_SHOWN = 100
_AS_IT_IS = MergeSettings()


def plan_merge(
    base: Mapping[str, TensorLike],
    facts: ModelFacts,
    changes: Changes,
    adapters: Mapping[str, TensorLike],
    settings: MergeSettings = _AS_IT_IS,
) -> Plan:
    """Plan a merge from headers alone.

    Args:
        base: header entries of the base checkpoint.
        facts: facts of the base's model, made with the keys of that checkpoint.
        changes: changes that the adapters make to the model in memory.
        adapters: header entries of the adapters' tensors, by their names in terms.
        settings: settings of the merge.

    Returns:
        the plan. `notes["untied"]` lists keys that were tied and are no longer: config.json then
        needs `tie_word_embeddings: false`. `notes["copied"]` lists keys that store a replaced
        tensor again. `notes["rows"]` has the rows of embeddings that grew, by name.

    Raises:
        ContractError: lists every finding on the base, the adapters and their fit.
    """
    planner = MergeOps(base, facts, changes, adapters, settings)
    # Changes with findings must not be used: their own findings are reported instead.
    ops = [] if changes.findings else list(planner.ops())
    findings = [*facts.findings, *changes.findings, *planner.findings]
    if findings:
        raise ContractError(
            f"merge: adapter and base do not fit: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    rows = {name: shape[0] for name, shape in changes.shapes.items()}
    notes: dict[str, Any] = {"untied": planner.untied} if planner.untied else {}
    notes |= {"copied": planner.copied} if planner.copied else {}
    notes |= {"rows": rows} if rows else {}
    used = {op.source for op in ops}
    dropped = [
        Dropped(source, f"replaced by {by}")
        for source, by in planner.replaced.items()
        if source not in used
    ]
    return Plan(tuple(ops), (*changes.dropped, *dropped), settings.max_shard_bytes, notes)


def merged_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return config.json of the base, with the vocabulary size and ties of the merged model."""
    rows = set(plan.notes.get("rows", {}).values())
    merged = resized_config(config, max(rows)) if rows else dict(config)
    return {**merged, "tie_word_embeddings": False} if plan.notes.get("untied") else merged
