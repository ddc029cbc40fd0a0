"""Find the base of SOURCE, refuse a wrong one, and decide how the adapter is merged into it.

LoRA trains on the base as it is stored, QLoRA on the base after a round trip through 4 bits. An
adapter does not record which. `choose_base` decides from, in this order: the setting `merge.base`,
a base that is itself stored in 4 bits or fp8, the record of our own training, the trainer's files
(`evidence`). Without any of them the adapter is refused, because the wrong base gives a worse
model, which no check sees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.audit.checks.values import value_faults
from tasks.audit.scan import first_difference, same_header
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Kind, Source, named_base
from tasks.core.errors import ConfigError, first_and_more
from tasks.core.files import file_stats, meant
from tasks.core.terminal import typed
from tasks.delivery.evidence import Evidence, Precision, find_evidence
from tasks.weights.files.documents import optional_json, read_json, read_manifest
from tasks.weights.files.folder import base_mismatch, published
from tasks.weights.quantized.config_fields import is_fp8, is_packed, remedy, stored


def find_base(source: Source, base: str | None, store: Path) -> Path | None:
    """Return the folder of the base: the setting, or the base that SOURCE names; None if unknown.

    `store` has our artifacts, which are searched for the recorded digest. Raises ConfigError if the
    setting is not the folder of a model.
    """
    if base is not None:
        folder = Path(base).expanduser().absolute()
        if not (folder / CONFIG).is_file():
            what = f"no {CONFIG} in it" if folder.is_dir() else "no such folder"
            near = "" if folder.is_dir() else meant(folder)
            hint = typed("base", near or "<folder of the base model>")
            raise ConfigError(f"base={base}: {what}", hint=hint)
        return folder
    digest, _ = _recorded_base(source)
    if digest and (original := published(digest, store, "base")) is not None:
        return original
    named = named_base(optional_json(source.root / ADAPTER_CONFIG))
    return named if named is not None and (named / CONFIG).is_file() else None


def base_missing(source: Source) -> ConfigError:
    """Return the error for an adapter whose base is unknown."""
    _, name = _recorded_base(source)
    what = f"{name}, which is no local folder and not in the hub cache" if name else "no model"
    return ConfigError(
        f"source={source.root} is {source.what}: its base is needed",
        details=[f"{ADAPTER_CONFIG} names {what}"],
        hint="base=<folder of the base model>",
    )


def wrong_base(source: Source, base: Source | None, store: Path, *, check: bool) -> list[str]:
    """Raise ConfigError for a base that SOURCE was not trained on.

    Without `check` the reasons for a refusal are returned as warnings.
    """
    is_model = source.is_model
    if base is None:
        if source.is_adapter:
            raise base_missing(source)
        unknown = "the base was not compared: with base=<folder> a model that equals it is refused"
        return [unknown] if is_model else []
    if is_model:
        source.base, source.values, base.values = base, None, None
    if is_model and check and _equals_base(source, base):
        raise ConfigError(
            f"source={source.root}: every tensor is that of base={base.root}, bit for bit: nothing "
            "was merged into it",
            # where verl's merger leaves an adapter
            details=[
                f"an adapter lies in {path.parent}"
                for path in sorted(source.root.glob(f"*/{ADAPTER_CONFIG}"))
            ],
            hint=f"source=<the adapter> {typed('base', base.root)}; check_base=false delivers it "
            "all the same",
        )
    digest, name = _recorded_base(source)
    wrong = base_mismatch(base.root, digest=digest, name=name, store=store)
    findings = [wrong] if wrong else []
    for code, fault in value_faults(source) if is_model else ():
        where = f"{code} {', '.join(fault.tensors[:3])}"
        findings.append(f"{where}: {fault.actual}; expected {fault.expected}")
    if findings and check:
        raise ConfigError(
            f"wrong base: {first_and_more(findings)}",
            details=findings,
            hint="base=<the base that was trained>; check_base=false takes this one all the same",
        )
    return findings


def _equals_base(source: Source, base: Source) -> bool:
    """Return True if all tensors of a model are bit-identical to its base's.

    The comparison ends at the first difference, so a trained model costs little reading.
    """
    ours = source.tensors
    same = bool(ours) and all(same_header(key, source, base) for key in ours)
    return same and first_difference(source, base, ours) is None


def _recorded_base(source: Source) -> tuple[str, str]:
    """Return the digest that our training recorded, and the name that PEFT did; "" for none."""
    name = optional_json(source.root / ADAPTER_CONFIG).get("base_model_name_or_path") or ""
    digest = source.manifest.get("inputs", {}).get("base", "")
    if source.kind is Kind.SHARDS:
        digest = optional_json(source.root / "train.json").get("base_digest", "")
    return str(digest), str(name)


def folder_identity(folder: Path) -> str:
    """Return a digest of a folder for cache keys.

    For our artifacts it is the digest of the manifest, otherwise a sha256 of the names, sizes,
    times and inodes of all files.
    """
    manifest = read_manifest(folder)
    if manifest:
        return str(manifest["digest"])
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [[str(path.relative_to(folder)), *file_stats(path)] for path in paths]
    text = json.dumps([str(folder.resolve()), files])
    return hashlib.sha256(text.encode()).hexdigest()


def training_record(source: Source, store: Path) -> dict[str, Any]:
    """Return `train.json` of our training that made SOURCE, shards or an artifact; else {}."""
    root: Path | None = source.root
    if source.kind is not Kind.SHARDS:
        digest = source.manifest.get("inputs", {}).get("trained")
        root = published(digest, store, "shards") if digest else None
    path = None if root is None else root / "train.json"
    return read_json(path) if path is not None and path.is_file() else {}


SDPA, FLASH = "sdpa", "flash_attention_2"


def attention_of(source: Source, store: Path) -> tuple[str, str]:
    """Return (attention to measure with, by transformers' name; a warning or "").

    Attention implementations round differently. With training's own, the measured drift is that of
    the weights alone.
    """
    recorded = str(training_record(source, store).get("attn_implementation", SDPA))
    if recorded == FLASH and find_spec("flash_attn") is None:
        return SDPA, f"training ran {FLASH}, and flash-attn is not installed: measured with {SDPA}"
    return recorded, ""


ORIGINAL, DEQUANTIZED = "original", "dequantized"
_MODES = {Precision.FULL: ORIGINAL, Precision.FOUR: DEQUANTIZED}
_EITHER = "merge.base=original for LoRA, merge.base=dequantized for QLoRA"


@dataclass(frozen=True)
class BaseChoice:
    """The base that an adapter is merged into."""

    mode: str = ""  # "original" or "dequantized"; "" if it could not be decided
    # quantization of the base in training, as `Op.quantization`; None for none
    quantization: dict[str, Any] | None = None
    reason: str = ""  # reason of the decision, for a person
    warnings: tuple[str, ...] = ()  # records that contradict the setting
    evidence: tuple[Evidence, ...] = ()  # records of the trainer

    def as_json(self) -> dict[str, str]:
        """Return the decision and its reason for a manifest."""
        return {"base": self.mode, "decided_by": self.reason}


def choose_base(
    source: Source, base: Path | None, merge: Mapping[str, Any], store: Path
) -> BaseChoice:
    """Decide into which base the adapter in SOURCE is merged.

    `merge` is that section of the settings. Raises ConfigError if the setting contradicts what our
    training recorded or how the base is stored.
    """
    mode = str(merge["base"])
    config = read_json(base / CONFIG) if base is not None else {}
    notes = source.manifest.get("notes", {})
    record = notes if "quantization" in notes else training_record(source, store)
    known, recorded = bool(record), record.get("quantization") or None
    if known and recorded is None and mode == DEQUANTIZED:
        raise ConfigError(
            "merge.base=dequantized, but training did not quantise the base",
            hint="merge.base=original, or merge.base=auto",
        )
    if source.manifest and source.is_adapter and not known and mode == "auto":
        raise ConfigError(
            f"source={source.root}: its manifest does not say whether training quantised the "
            "base, and the training it names is not in paths.runs",
            hint=_EITHER,
        )
    evidence = () if known or source.is_model else find_evidence(source.root)
    if base is not None and (is_packed(config) or (is_fp8(config) and recorded is None)):
        return _stored_small(base, mode, config, evidence)
    loaded = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if not known:
        details: dict[str, Any] = {
            "type": str(merge["quant_type"]),
            "double_quant": bool(merge["double_quant"]),
            "compute_dtype": loaded,
            "loaded_dtype": loaded,
        }
        return _by_evidence(mode, details, evidence)
    if mode not in (ORIGINAL, DEQUANTIZED):
        mode = ORIGINAL if recorded is None else DEQUANTIZED
    through = None
    if recorded is not None:  # our training loads the base in the dtype that it computes in
        loaded = recorded.get("compute_dtype", loaded)
        through = {"loaded_dtype": loaded, **recorded, "base": mode}
    return BaseChoice(mode, through, "recorded by its training")


def _stored_small(
    base: Path, mode: str, config: Mapping[str, Any], evidence: tuple[Evidence, ...]
) -> BaseChoice:
    """Choose for a base that has no other weights than its 4 bits or fp8, which are decoded.

    In 4 bits it is the base of QLoRA training, in fp8 the base as stored.
    """
    packed = is_packed(config)
    how = "4 bits" if packed else f"8 bits ({stored(config) or ''})"
    chosen = DEQUANTIZED if packed else ORIGINAL
    if mode in (ORIGINAL, DEQUANTIZED) and mode != chosen:
        raise ConfigError(
            f"merge.base={mode}, but base={base} is stored in {how} and has no other weights",
            hint="merge.base=auto; or base=<the same model in 16 bits>",
        )
    against = [each for each in evidence if (each.precision is Precision.FULL) == packed]
    if against and mode != chosen:
        raise ConfigError(
            f"base={base} is stored in {how}, and the adapter was trained on the base "
            f"{against[0].precision.value} ({against[0]})",
            hint=f"{remedy(base)}; or merge.base={chosen}, which takes this one all the same",
        )
    return BaseChoice(chosen, None, f"{base} is stored in {how}", evidence=evidence)


def _by_evidence(
    mode: str, details: Mapping[str, Any], evidence: tuple[Evidence, ...]
) -> BaseChoice:
    """Choose for a source made elsewhere: the setting decides, else the trainer's files."""
    precisions = {item.precision for item in evidence}
    four = next((item.quantization for item in evidence if item.precision is Precision.FOUR), {})
    details = {**details, **four}
    if mode in (ORIGINAL, DEQUANTIZED):
        warnings = tuple(
            f"merge.base={mode}, but the adapter was trained on the base {item.precision.value} "
            f"({item})"
            for item in evidence
            if _MODES.get(item.precision) != mode
        )
        # The reference is the trained model, so the drift shows the loss of a wrong choice.
        through = mode == DEQUANTIZED or precisions == {Precision.FOUR}
        quantization = {**details, "base": mode} if through else None
        return BaseChoice(mode, quantization, f"merge.base={mode}", warnings, evidence)
    chosen = _MODES.get(next(iter(precisions)), "") if len(precisions) == 1 else ""
    through = chosen != ORIGINAL
    quantization = {**details, "base": DEQUANTIZED} if through else None
    return BaseChoice(chosen, quantization, str(evidence[0]) if chosen else "", evidence=evidence)


def undecided(source: Source, choice: BaseChoice) -> ConfigError:
    """Return the error for an adapter whose training base is not known, or cannot be made."""
    records = [f"{item}: {item.precision.value}" for item in choice.evidence]
    if {item.precision for item in choice.evidence} == {Precision.OTHER}:
        return ConfigError(
            f"source={source.root}: it was trained on a base {records[0]}",
            details=records,
            hint="merge.base=original takes the 16-bit base all the same",
        )
    why = "its trainer's files contradict each other" if records else "nothing beside it says"
    return ConfigError(
        f"source={source.root}: {why}: it was trained on the base as stored (LoRA) or in 4 bits "
        f"(QLoRA), and merged into the other it is a worse model, which no check sees"
        + (f": {records[0]}" if records else ""),
        details=records,
        hint=_EITHER,
    )
