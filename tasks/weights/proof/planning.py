"""Plan the merge of an adapter into a base from configuration and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.read import Adapter, read_adapter
from tasks.weights.execute.worker import Perform, perform
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.opening import open_model
from tasks.weights.files.reader import read_json
from tasks.weights.files.source import Source
from tasks.weights.head_plans import merged_reward
from tasks.weights.heads import detect, read_folder
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.operations import Plan
from tasks.weights.proof.merge import BASE
from tasks.weights.quantized.source import decoding


@dataclass(frozen=True)
class Planned:
    """The plan of a merge.

    Attributes:
        plan: one operation per tensor.
        sources: its inputs.
        tied: keys that a merged checkpoint may hold or not -> keys that hold the same tensor.
        live: the model in memory; None for a reward model.
    """

    plan: Plan
    sources: Mapping[str, Source]
    tied: Mapping[str, str]
    live: LiveModel | None = None


def planned(base: Path, adapter: Path, *, perform: Perform = perform) -> Planned:
    """Plan the merge of an adapter into its base; nothing is written.

    Args:
        base: folder of the base model.
        adapter: folder of a PEFT adapter.
        perform: answers requests about model classes that `families.plain` does not know.

    Raises:
        ContractError: base and adapter do not fit; names every problem.
        ArtifactError: a file cannot be read.
    """
    folder = read_folder(adapter)
    read, model = read_adapter(adapter, beside=folder.beside), open_model(base)
    if detect(folder).is_of_reward:
        return _reward(read, model, base, perform)
    disk = {key: tuple(info.shape) for key, info in model.tensors.items()}
    facts = perform(model_facts, base, "bfloat16", disk)
    infos = {f"{read.name}:{key}": info for key, info in read.tensors.tensors.items()}
    plan = plan_merge(model.tensors, facts, changes([(read, 1.0)], facts.live), infos)
    sources = {BASE: model, read.name: read.tensors}
    untied = {*plan.notes.get("untied", ())}
    tied = {key: to for key, to in facts.tied.items() if key not in untied}
    return Planned(decoding(plan, sources), sources, tied, facts.live)


def _reward(read: Adapter, model: Source, base: Path, perform: Perform) -> Planned:
    config = read_json(base / "config.json")
    merge = merged_reward(
        read, model, config, MergeSettings(base=BASE), dtype="bfloat16", perform=perform
    )
    return Planned(decoding(merge.plan, merge.sources), merge.sources, {})
