"""The plan of a merge that makes a reward model: a base, an adapter, and the head in the adapter.

The base is a language model, so its file has no head, and the head that its own class has is no
part of a reward model. The adapter has to bring the head whole (`modules_to_save`), unless the base
is a reward model itself.
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
    "the adapter does not bring the reward head, and the base has none: it was never saved, and "
    "nothing can make it up. Train again with modules_to_save=[score]"
)


@dataclass(frozen=True)
class RewardBase:
    """A base as the reward model's class sees it.

    Attributes:
        tensors: header entries that are part of the model, and the head's place in them.
        dropped: keys of the language model's own head.
        has_head: whether the base is a reward model already.
    """

    tensors: Mapping[str, TensorLike]
    dropped: tuple[str, ...]
    has_head: bool


def reward_base(base: Mapping[str, TensorLike], hidden: int) -> RewardBase:
    """Look at a base's header entries. `hidden`: size of the last hidden state."""
    dropped = tuple(key for key in OUTPUT_EMBEDDINGS if key in base)
    kept: dict[str, TensorLike] = {key: one for key, one in base.items() if key not in dropped}
    has_head = SCORE in kept
    if not has_head:
        dtype = next(iter(kept.values())).dtype if kept else "BF16"
        kept[SCORE] = TensorInfo((1, hidden), dtype, 0, 0)  # the adapter's head takes its place
    return RewardBase(kept, dropped, has_head)


def is_reward_adapter(folder: HeadFolder) -> bool:
    """Whether an adapter says, or its tensors show, that it was trained with a reward head."""
    found = detect(folder)
    if found.head is not None:
        return found.head.dialect == "peft"
    return bool(found.lora_on) or (HEAD not in folder.sources and bool(found.findings))


def reward_side(
    base: Source, config: Mapping[str, Any], dtype: str, perform: Perform = perform
) -> tuple[Mapping[str, TensorLike], ModelFacts]:
    """A language model's tensors as those of its family's reward model, and that model's facts.

    Raises:
        ContractError: config.json does not say how wide the head is.
        ArtifactError: the family has no class for rewards.
    """
    seen, _, facts = _seen(base, config, dtype, perform)
    return seen.tensors, facts


def _seen(
    base: Source, config: Mapping[str, Any], dtype: str, perform: Perform
) -> tuple[RewardBase, str, ModelFacts]:
    hidden = hidden_size(config)
    if hidden is None:
        raise ContractError(
            "reward: the base's config.json has no hidden_size: how wide the head is is not told",
            hint="give the base with the config.json that save_pretrained wrote",
        )
    seen = reward_base(base.tensors, hidden)
    disk = {key: tuple(one.shape) for key, one in seen.tensors.items()}
    name, facts = ask_reward_facts(perform, config, dtype, disk)
    return seen, name, facts


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
        adapter: with the head in it; input "adapter".
        base: the base's tensors; input `settings.base`.
        config: the base's config.json.
        settings: what to make of it.
        dtype: torch name of the dtype of the model's facts.
        endings: ids that end a text; see `reward_config`.
        normalisation: of the scores; None takes what lies beside the adapter, or in the base.
        perform: who knows the model classes.

    Raises:
        ContractError: no head, or whatever `plan_merge` finds.
        ArtifactError: the family has no class for rewards.
    """
    seen, name, facts = _seen(base, config, dtype, perform)
    operands = {f"{adapter.name}:{key}": one for key, one in adapter.tensors.tensors.items()}
    found = changes([(adapter, 1.0)], facts.live)
    plan = plan_reward_merge(seen, facts, found, operands, settings)
    normalisation = normalisation or _beside(adapter, config)
    document = reward_config(config, name, normalisation, endings)
    sources = {settings.base: base, adapter.name: adapter.tensors}
    return Parted(plan, sources, document, facts, value_head=False)


def _beside(adapter: Adapter, config: Mapping[str, Any]) -> Normalisation:
    """OpenRLHF writes a config.json into the adapter's folder; mean and std are training's."""
    path = adapter.root / "config.json"
    found, wrong = normalisation_from(read_json(path) if path.is_file() else config)
    if wrong:
        raise ContractError(f"reward: {first_and_more(wrong)}", details=wrong)
    return found


def plan_reward_merge(
    base: RewardBase,
    facts: ModelFacts,
    changes: Changes,
    adapters: Mapping[str, TensorLike],
    settings: MergeSettings,
) -> Plan:
    """Plan a merge into `*ForSequenceClassification`; arguments as of `families.plan_merge`.

    Args:
        base: the base.
        facts: of the reward model's class, made with the keys of `base.tensors`.
        changes: what the adapters do to it.
        adapters: header entries of their tensors.
        settings: what to make of it.

    Raises:
        ContractError: no head, or whatever `plan_merge` finds.
    """
    if not base.has_head and _live_name(facts) not in changes.replacements:
        lora = _live_name(facts) in changes.terms
        why = "LoRA was trained on a random head that was never saved: " if lora else ""
        raise ContractError(f"reward: {why}{NO_HEAD}", details=changes.findings)
    plan = plan_merge(base.tensors, facts, changes, adapters, settings)
    place = f"{settings.base}:{SCORE}"
    dropped = [one for one in plan.dropped if base.has_head or one.source != place]
    dropped += [
        Dropped(f"{settings.base}:{key}", "the language model's head: a reward model has none")
        for key in base.dropped
    ]
    return replace(plan, dropped=tuple(dropped))


def _live_name(facts: ModelFacts) -> str:
    return next((one.live for one in facts.places if one.disk == SCORE), SCORE)
