"""Plan the merge of a reward adapter into its base.

The base is usually a language model. Its LM head is dropped, because a reward model has none, and
the adapter has to contain the full reward head (`modules_to_save`). A base that is a reward model
itself keeps its reward head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.core.contract import TensorLike
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.adapters.changes import Changes, changes
from tasks.weights.adapters.read import Adapter
from tasks.weights.execute.worker import Perform, ask_reward_facts, perform
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.header import TensorInfo
from tasks.weights.files.reader import read_json
from tasks.weights.files.source import Source
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import HEAD, HeadFolder, hidden_size
from tasks.weights.heads.normalisation import Normalisation, normalisation_from
from tasks.weights.heads.reward import OUTPUT_EMBEDDINGS, SCORE, reward_config
from tasks.weights.heads.separate import Parted
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Dropped, Plan

NO_HEAD = (
    "neither the adapter nor the base has a reward head, score.weight. One that was never saved "
    "cannot be recovered: train again with modules_to_save=[score]"
)


@dataclass(frozen=True)
class RewardBase:
    """A base with the tensors of the reward model's class.

    Attributes:
        tensors: header entries of the reward model; the entry of its head may be a placeholder.
        dropped: keys of the LM head.
        has_head: True if the base is a reward model already.
    """

    tensors: Mapping[str, TensorLike]
    dropped: tuple[str, ...]
    has_head: bool


def reward_base(base: Mapping[str, TensorLike], hidden: int) -> RewardBase:
    """Return a base's header entries as those of a reward model; its head has `hidden` inputs."""
    dropped = tuple(key for key in OUTPUT_EMBEDDINGS if key in base)
    kept: dict[str, TensorLike] = {key: info for key, info in base.items() if key not in dropped}
    has_head = SCORE in kept
    if not has_head:
        dtype = next(iter(kept.values())).dtype if kept else "BF16"
        kept[SCORE] = TensorInfo((1, hidden), dtype, 0, 0)  # replaced by the adapter's head
    return RewardBase(kept, dropped, has_head)


def is_reward_adapter(folder: HeadFolder) -> bool:
    """Return True if an adapter was trained with a reward head, by configuration or tensors."""
    detected = detect(folder)
    if detected.head is not None:
        return detected.head.dialect == "peft"
    return bool(detected.lora_on) or (HEAD not in folder.sources and bool(detected.findings))


def reward_side(
    base: Source, config: Mapping[str, Any], dtype: str, perform: Perform = perform
) -> tuple[Mapping[str, TensorLike], ModelFacts]:
    """Return a base's tensors as those of its family's reward model, and that model's facts.

    Args:
        base: tensors of the base.
        config: config.json of the base.
        dtype: torch name of the dtype of the model's facts.
        perform: runs requests that need transformers.

    Raises:
        ContractError: config.json has no hidden_size.
        ArtifactError: the family has no class for rewards.
    """
    model, _, facts = _as_reward_model(base, config, dtype, perform)
    return model.tensors, facts


def _as_reward_model(
    base: Source, config: Mapping[str, Any], dtype: str, perform: Perform
) -> tuple[RewardBase, str, ModelFacts]:
    hidden = hidden_size(config)
    if hidden is None:
        raise ContractError(
            "reward: the base's config.json has no hidden_size, so the head's width is not known",
            hint="use a base with the config.json that save_pretrained wrote",
        )
    model = reward_base(base.tensors, hidden)
    disk = {key: tuple(info.shape) for key, info in model.tensors.items()}
    name, facts = ask_reward_facts(perform, config, dtype, disk)
    return model, name, facts


def merged_reward(
    adapter: Adapter,
    base: Source,
    config: Mapping[str, Any],
    settings: MergeSettings,
    *,
    dtype: str,
    endings: Sequence[int] = (),
    normalisation: Normalisation | None = None,
    perform: Perform = perform,
) -> Parted:
    """Plan the reward model that an adapter makes of its base; nothing is written.

    Args:
        adapter: adapter that contains the head; input `adapter.name`.
        base: tensors of the base; input `settings.base`.
        config: config.json of the base.
        settings: settings of the merge.
        dtype: torch name of the dtype of the model's facts.
        endings: ids that end a text; see `reward_config`.
        normalisation: normalisation of the rewards; None reads it from the config.json beside the
            adapter, or else from that of the base.
        perform: runs requests that need transformers.

    Raises:
        ContractError: no head, or a finding of `plan_merge`.
        ArtifactError: the family has no class for rewards.
    """
    model, name, facts = _as_reward_model(base, config, dtype, perform)
    operands = {f"{adapter.name}:{key}": info for key, info in adapter.tensors.tensors.items()}
    model_changes = changes([(adapter, 1.0)], facts.live)
    plan = plan_reward_merge(model, facts, model_changes, operands, settings)
    normalisation = normalisation or _beside(adapter, config)
    document = reward_config(config, name, normalisation, endings)
    sources = {settings.base: base, adapter.name: adapter.tensors}
    return Parted(plan, sources, document, facts, value_head=False)


def _beside(adapter: Adapter, config: Mapping[str, Any]) -> Normalisation:
    """Read the normalisation that OpenRLHF writes into config.json in the adapter's folder."""
    path = adapter.root / "config.json"
    normalisation, wrong = normalisation_from(read_json(path) if path.is_file() else config)
    if wrong:
        raise ContractError(f"reward: {first_and_more(wrong)}", details=wrong)
    return normalisation


def plan_reward_merge(
    base: RewardBase,
    facts: ModelFacts,
    changes: Changes,
    adapters: Mapping[str, TensorLike],
    settings: MergeSettings,
) -> Plan:
    """Plan a merge into `*ForSequenceClassification`; see `families.merging.plan_merge`.

    Args:
        base: the base as a reward model.
        facts: facts of the reward model's class, made with the keys of `base.tensors`.
        changes: changes that the adapters make to it.
        adapters: header entries of the adapters' tensors, by their names in terms.
        settings: settings of the merge.

    Raises:
        ContractError: no head, or a finding of `plan_merge`.
    """
    if not base.has_head and _live_name(facts) not in changes.replacements:
        lora = _live_name(facts) in changes.terms
        why = "LoRA was trained on a random head that was never saved: " if lora else ""
        raise ContractError(f"reward: {why}{NO_HEAD}", details=changes.findings)
    plan = plan_merge(base.tensors, facts, changes, adapters, settings)
    place = f"{settings.base}:{SCORE}"
    dropped = [entry for entry in plan.dropped if base.has_head or entry.source != place]
    dropped += [
        Dropped(f"{settings.base}:{key}", "the language model's head: a reward model has none")
        for key in base.dropped
    ]
    return replace(plan, dropped=tuple(dropped))


def _live_name(facts: ModelFacts) -> str:
    return next((place.live for place in facts.places if place.disk == SCORE), SCORE)
