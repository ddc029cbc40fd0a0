"""Plan the model to serve from a folder with a head, and write a policy's value head.

    detected = detect(read_folder(source))
    parted = separate(detected, dtype="bfloat16")        # a full model
    parted = merged_reward(adapter, base, config, ...)   # a reward adapter and its base
    validate(parted.plan, parted.sources)                # and compare it with parted.facts
    execute(parted.plan, parted.sources, out)            # and parted.config as its config.json
    write_value_head(detected, elsewhere)                # of a policy

A policy loses its value head: vLLM loads every weight file of a folder and fails on
`v_head.summary.weight`, but training needs the head to continue.

A reward model becomes `*ForSequenceClassification` with one label. A score is the head's output at
the last token, as before. config.json stores the settings that have no tensor:

    mean, std           normalised reward = (score - mean) / std; without them, the score itself.
                        `score` has no bias, so a head's bias b goes into the mean: mean - b
    value_head_prefix   "score", so that OpenRLHF can read the same folder
    problem_type        "regression", so that vLLM returns the score and not its sigmoid

OpenRLHF's loader leaves its buffers uninitialised under transformers 5, so both numbers are only in
config.json; vLLM takes them as `PoolerConfig(logit_mean=mean, logit_sigma=std)`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.core.disk import disk_full_named
from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.execute.worker import Perform, perform
from tasks.weights.execute.writer import Spec, shard_file
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import nonfinite
from tasks.weights.files.tensors import Reader, Sources, Tensor, Tensors
from tasks.weights.heads import (
    MODEL,
    OUTPUT_EMBEDDINGS,
    SCORE,
    WRAPPER,
    Detected,
    Head,
    HeadFolder,
    Normalisation,
    hidden_size,
    normalisation_from,
    read_scalar,
)
from tasks.weights.lora import Adapter, changes
from tasks.weights.merge import MergeSettings, plan_merge
from tasks.weights.model import Model, model_facts
from tasks.weights.model_class import read_config
from tasks.weights.plan import Dropped, Plan, as_is
from tasks.weights.tokens.tokenizer import read_tokenizer

STEM = "value_head"
KEYS = ("v_head.summary.weight", "v_head.summary.bias")
"""Keys of weight and bias in `value_head.safetensors`."""
_KEPT_APART = "the value head: kept apart, in value_head.safetensors"
_NO_LM_HEAD = "the language model's head: a reward model has none"
_NO_HEAD = (
    "neither the adapter nor the base has a reward head, score.weight. One that was never saved "
    "cannot be recovered: train again with modules_to_save=[score]"
)


@dataclass(frozen=True)
class Parted:
    """The plan of a model to serve, its inputs, its config.json, and the facts of its class."""

    plan: Plan
    sources: Sources
    config: Mapping[str, Any]
    facts: Model


def separate(detected: Detected, *, dtype: str, perform: Perform = perform) -> Parted:
    """Plan the model to serve from a full model with a head: a reward model, or a policy.

    A `v_head` whose purpose the files do not tell counts as a value head. `dtype` is the torch name
    of the facts' dtype; tensors keep their own. Raises ContractError: no usable head, a critic's.
    """
    head, folder = detected.require(), detected.folder
    if head.role == "value":
        raise ContractError(
            f"{folder.root}: a critic: {head.weight} gives the value of every token, not the "
            "reward of a text",
            hint="source=<folder of the policy>: a critic is useful only to resume training",
        )
    if head.role == "reward":
        return _reward_model(folder, head, detected.normalisation, dtype, perform)
    plan = _plan_model(
        folder, dict.fromkeys((*head.sources, *detected.normalisation.buffers), _KEPT_APART)
    )
    facts = perform(model_facts, folder.root, dtype, _shapes(plan))
    return Parted(plan, {MODEL: folder.main}, folder.config, facts)


def _reward_model(
    folder: HeadFolder, head: Head, normalisation: Normalisation, dtype: str, perform: Perform
) -> Parted:
    left_out = {
        f"{MODEL}:{key}": _NO_LM_HEAD
        for key in folder.main
        if key.removeprefix(WRAPPER) in OUTPUT_EMBEDDINGS
    }
    left_out |= dict.fromkeys(normalisation.buffers, "stored in config.json")
    if head.bias:
        left_out[head.bias] = "the head's bias: stored in config.json, as part of the mean"
        bias = read_scalar(folder.main, head.bias.partition(":")[2])
        normalisation = normalisation.with_bias(bias)
    plan = _plan_model(folder, left_out, score=head.weight)
    name, facts = perform(reward_facts, folder.config, dtype, _shapes(plan))
    config = reward_config(folder.config, name, normalisation, endings(folder.root))
    return Parted(plan, {MODEL: folder.main}, config, facts)


def _plan_model(folder: HeadFolder, left_out: Mapping[str, str], score: str = "") -> Plan:
    """Plan the model's tensors without TRL's prefix, and the tensor `score` as `score.weight`."""
    whole = as_is(folder.main, MODEL).ops
    kept = [op for op in whole if op.source not in left_out and op.source != score]
    ops = [replace(op, name=op.key.removeprefix(WRAPPER)) for op in kept]
    ops += [replace(op, name=SCORE) for op in whole if op.source == score]
    dropped = [Dropped(op.source, left_out[op.source]) for op in whole if op.source in left_out]
    return Plan(tuple(ops), tuple(dropped))


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {op.name: op.shape for op in plan.ops}


def endings(*folders: Path) -> list[int]:
    """Return the EOS ids of the first folder that has a tokenizer; empty if none has."""
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return read_tokenizer(folder).stops
    return []


def reward_config(
    config: Mapping[str, Any],
    architecture: str,
    normalisation: Normalisation,
    endings: Sequence[int] = (),
) -> dict[str, Any]:
    """Return config.json of a reward model of class `architecture`, from that of any model.

    transformers takes the score at the last token that is not `pad_token_id`. If the padding token
    also ends texts (pad = eos), this is one token too early. config.json then gets no padding
    token, so that transformers refuses to score batches instead of scoring them wrongly.
    """
    gone = ("quantization_config", "torch_dtype", "mean", "std", "num_labels", "auto_map")
    document: dict[str, Any] = {key: value for key, value in config.items() if key not in gone}
    document |= {
        "architectures": [architecture],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": "regression",
        "value_head_prefix": SCORE.partition(".")[0],
    }
    if normalisation.is_there:
        document |= {"mean": normalisation.mean, "std": normalisation.std, "normalize_reward": True}
    if document.get("pad_token_id") in endings:
        document["pad_token_id"] = None
    return document


def reward_facts(
    config: Mapping[str, Any], dtype: str, disk: Mapping[str, tuple[int, ...]]
) -> tuple[str, Model]:
    """Return the class name of a reward model of a family, and its facts with one label.

    Imports transformers; call it through `tasks.weights.execute.worker`. `config` is the
    config.json of any model of the family, `disk` has the shape of every tensor by key. Raises
    ArtifactError if the family has no such class.
    """
    from transformers import AutoModelForSequenceClassification

    gone = ("quantization_config", "auto_map", "mean", "std")
    plain = {key: value for key, value in config.items() if key not in gone}
    plain |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(plain))
        described = read_config(Path(folder))
        classes = AutoModelForSequenceClassification._model_mapping
        if type(described) not in classes:
            raise ArtifactError(
                f"transformers has no {described.model_type} model for sequence classification, so "
                "a reward model of that family cannot be served"
            )
        name = str(classes[type(described)].__name__)
        path.write_text(json.dumps({**plain, "architectures": [name]}))
        return name, model_facts(Path(folder), dtype, disk)


def reward_base(
    base: Tensors, config: Mapping[str, Any], dtype: str, perform: Perform = perform
) -> tuple[dict[str, Tensor], str, Model]:
    """Return a base's tensors as those of its family's reward model, the class's name, its facts.

    The LM head is left out. A head that the base does not have is a placeholder, to be replaced by
    the adapter's.
    """
    hidden = hidden_size(config)
    if hidden is None:
        raise ContractError(
            "reward: the base's config.json has no hidden_size, so the head's width is not known",
            hint="use a base with the config.json that save_pretrained wrote",
        )
    tensors = {key: info for key, info in base.items() if key not in OUTPUT_EMBEDDINGS}
    if SCORE not in tensors:
        of_base = next(iter(tensors.values())).dtype if tensors else "BF16"
        tensors[SCORE] = Tensor((1, hidden), of_base)
    disk = {key: tuple(info.shape) for key, info in tensors.items()}
    return tensors, *perform(reward_facts, config, dtype, disk)


def merged_reward(
    adapter: Adapter,
    base: Tensors,
    config: Mapping[str, Any],
    settings: MergeSettings,
    *,
    dtype: str,
    endings: Sequence[int] = (),
    normalisation: Normalisation | None = None,
    perform: Perform = perform,
) -> Parted:
    """Plan the reward model that an adapter makes of its base; inputs as `settings` names them.

    A base that is a reward model itself keeps its head; with another, the adapter has the full head
    (`modules_to_save`). Without `normalisation`, that of a config.json beside the adapter counts
    (OpenRLHF), or else that of `config`, the base's. Raises ContractError if there is no head.
    """
    tensors, name, facts = reward_base(base, config, dtype, perform)
    changed = changes([(adapter, 1.0)], facts)
    live = next((slot.live for slot in facts.slots if slot.key == SCORE), SCORE)
    has_head = SCORE in base
    if not has_head and live not in changed.replacements:
        lora = live in changed.terms
        why = "LoRA was trained on a random head that was never saved: " if lora else ""
        raise ContractError(f"reward: {why}{_NO_HEAD}", details=changed.findings)
    headers = {f"{adapter.name}:{key}": info for key, info in adapter.tensors.items()}
    plan = plan_merge(tensors, facts, changed, headers, settings)
    placeholder = "" if has_head else f"{settings.base}:{SCORE}"
    dropped = [entry for entry in plan.dropped if entry.source != placeholder]
    lm_head = [key for key in OUTPUT_EMBEDDINGS if key in base]
    dropped += [Dropped(f"{settings.base}:{key}", _NO_LM_HEAD) for key in lm_head]
    if normalisation is None:
        beside = adapter.root / "config.json"
        stated = read_json(beside) if beside.is_file() else config
        normalisation = normalisation_from(stated, "reward: config.json")
    document = reward_config(config, name, normalisation, endings)
    sources = {settings.base: base, adapter.name: adapter.tensors}
    return Parted(replace(plan, dropped=tuple(dropped)), sources, document, facts)


def write_value_head(detected: Detected, out: Path) -> tuple[str, ...]:
    """Write `value_head.safetensors`, which TRL and LLaMA-Factory read, and `value_head.json`.

    Returns the keys of its tensors; their bytes are those of the source. Raises ContractError for
    a head with NaN or infinity.
    """
    head, folder = detected.require(), detected.folder
    names = dict(zip(KEYS, head.sources, strict=False))
    specs, contents = [], {}
    for name, tensor in names.items():
        source, _, key = tensor.partition(":")
        info = folder.sources[source][key]
        with Reader(info.extents) as reader:
            contents[name] = reader.read()
        if info.hash not in (None, blake3(contents[name]).hexdigest()):
            raise ArtifactError(f"{tensor}: its bytes do not match the hash in its manifest")
        if count := nonfinite(contents[name], info.dtype):
            raise ContractError(f"{folder.root}: {name}: {count} elements not finite")
        specs.append(Spec(name, tuple(info.shape), info.dtype))
    document = {
        "format": 1,
        "role": head.role,
        "dialect": head.dialect,
        "hidden_size": head.shape[1],
        "dtype": head.dtype,
        "bias": bool(head.bias),
        "source": names,
        "mean": detected.normalisation.mean,
        "std": detected.normalisation.std,
    }
    file = shard_file(f"{STEM}.safetensors", specs)
    with disk_full_named(out):
        data = b"".join(contents[name].tobytes() for name in file.starts)
        (out / file.name).write_bytes(file.head + data)
        (out / f"{STEM}.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    return tuple(names)
