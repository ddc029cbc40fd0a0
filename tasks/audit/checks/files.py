"""Check the weight files and the index: which files a loader opens, and if they fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tasks.audit.catalogue.files import Files, Folders
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import ADAPTER_CONFIG, ADAPTERS, CONFIG, MODELS, Kind
from tasks.audit.source import Source
from tasks.audit.weights import Weights, open_weights
from tasks.weights.files.index import index_of, is_hidden
from tasks.weights.heads.folder import SIDE_FILES
from tasks.weights.plan.partitions import PARTITIONS

_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files that vLLM excludes from *.bin (`filter_files_not_needed_for_inference`)."""
TRAINER_STATE = re.compile(
    r"training_args\.bin|(optimizer|scheduler|scaler|sampler|dl_state_dict)[^/]*\.(pt|bin)"
    r"|(rng_state|random_states)[^/]*\.(pth|pkl)|pytorch_model_fsdp[^/]*\.bin"
)
"""Files that the Trainers of transformers and accelerate save for resuming."""
_COUNTED = re.compile(r"(?P<stem>.+)-(?P<one>\d+)-of-(?P<all>\d+)\.(safetensors|bin)")
_STATES = re.compile(r"(consolidated|model|pytorch_model)[^/]*\.pth?")
_MISTRAL = "consolidated"
_MAX_SHARDS = 100_000


def check(source: Source) -> Iterator[Finding]:
    """Check that configuration and weights exist, then the index, then other weight files."""
    weights = source.weights
    yield from _configuration(source)
    if source.is_model or source.is_adapter or source.kind is Kind.MIXTURE:
        yield from _two_sets(source)
        yield from _index(source, weights)
        yield from _counted(weights)
        yield from _strays(source, weights)


def _configuration(source: Source) -> Iterator[Finding]:
    name = ADAPTER_CONFIG if source.is_adapter else CONFIG
    known = source.is_adapter or source.is_model
    if known and name not in source.folder.files:
        yield Folders.CONFIG_MISSING.at(name, found="no such file", expected=f"{name}")
    parts = source.kind is Kind.SHARDS and source.config(PARTITIONS).get("mode") == "adapter"
    if parts and ADAPTER_CONFIG not in source.folder.files:
        yield Folders.CONFIG_MISSING.at(
            ADAPTER_CONFIG, found="no such file", severity=Severity.WARNING,
            expected=f"{ADAPTER_CONFIG}, or adapter_config=FILE when you gather",
        )  # fmt: skip
    if source.is_adapter and not (source.weights.files or source.weights.absent):
        yield Files.WEIGHTS_MISSING.at(
            "", found=f"only {ADAPTER_CONFIG}", expected=" or ".join(ADAPTERS)
        )
    if source.kind is Kind.NOTHING and CONFIG in source.folder.files:
        yield Files.WEIGHTS_MISSING.at(
            "", found=f"{CONFIG} without weights", expected=f"{' or '.join(MODELS)}, or an index"
        )


def _two_sets(source: Source) -> Iterator[Finding]:
    single = source.weights.single
    names = ADAPTERS if source.is_adapter else MODELS
    other_name = next(name for name in names if name != single) if single in names else ""
    there = [name for name in (other_name, index_of(other_name)) if name in source.folder.files]
    if there and not source.weights.is_pickled:
        yield Files.TWO_WEIGHT_SETS.at(there[0], found=f"{single} and {there[0]}", expected="one")


def _index(source: Source, weights: Weights) -> Iterator[Finding]:
    name = index_of(weights.single)
    if name in source.folder.wrong:
        yield Files.INDEX_UNREADABLE.at(
            name, found=source.folder.wrong[name], expected='{"weight_map": {tensor: file}}'
        )
    if weights.strange:
        named = ", ".join(weights.strange[:3])
        yield Files.INDEX_PATH.at(
            name, found=named, expected="plain names of files in the same folder"
        )
    if weights.absent:
        yield Files.INDEX_MISSING_FILE.at(
            name, found=f"{len(weights.absent)} missing: {', '.join(weights.absent[:3])}",
            expected=f"all {len(weights.absent) + len(weights.files)} files",
        )  # fmt: skip
    for key, first, second in weights.twice[:20]:
        yield Files.KEY_TWICE.at(
            second, key, found=f"in {first} and in {second}", expected="in one"
        )
    if weights.index is not None:
        yield from _keys(source, weights, weights.index)
    elif len(weights.files) > 1:
        yield Files.INDEX_ABSENT.at(name, found=f"{len(weights.files)} shards", expected=name)


def _keys(source: Source, weights: Weights, index: Mapping[str, str]) -> Iterator[Finding]:
    name = index_of(weights.single)
    read = set(weights.files) - set(weights.unread)
    lost = [key for key, file in index.items() if file in read and key not in weights.tensors]
    if lost:
        yield Files.INDEX_MISSING_KEY.at(
            name, lost, found=f"{len(lost)} in no file", expected="every tensor in its file"
        )
    twice = {key for key, _, _ in weights.twice}
    moved = [
        key for key, tensor in weights.tensors.items()
        if key not in twice and index.get(key, tensor.file) in read - {tensor.file}
    ]  # fmt: skip
    if moved:
        yield Files.INDEX_MISSING_KEY.at(
            name, moved, found=f"{len(moved)} in another file than the index says",
            expected="every tensor in its file",
        )  # fmt: skip
    unknown = [key for key in weights.tensors if key not in index]
    if unknown:
        yield Files.KEY_NOT_IN_INDEX.at(
            name,
            unknown,
            found=f"{len(unknown)} not in the index",
            expected="every tensor of its files",
        )
    if weights.single in source.folder.files and weights.single not in weights.files:
        yield Files.STALE_INDEX.at(
            name, found=f"{weights.single} beside it", expected="one or the other"
        )
    metadata = source.config(name).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and weights.is_whole and total != weights.nbytes:
        yield Files.INDEX_TOTAL_SIZE.at(name, found=str(total), expected=f"{weights.nbytes}")


def _counted(weights: Weights) -> Iterator[Finding]:
    """Check that all shards exist that `model-00001-of-00003` announces."""
    if weights.index is not None:
        return  # the index is more precise
    numbers: dict[int, set[int]] = {}
    for name in weights.files:
        match = _COUNTED.fullmatch(name)
        if match and len(match["all"]) < 7:
            numbers.setdefault(int(match["all"]), set()).add(int(match["one"]))
    for count, there in numbers.items():
        missing = [
            number for number in range(1, min(count, _MAX_SHARDS) + 1) if number not in there
        ]
        if missing:
            yield Files.SHARDS_INCOMPLETE.at(
                "", found=f"{len(there)} of {count}", expected=f"also number {missing[0]}"
            )


def _strays(source: Source, weights: Weights) -> Iterator[Finding]:
    known = {*weights.files, *weights.absent}
    here = [name for name in source.folder.here() if name not in known]
    hidden = [name for name in here if is_hidden(name) and name.endswith((".safetensors", ".bin"))]
    if hidden:
        yield Files.HIDDEN_WEIGHT_FILE.at(
            hidden[0], hidden, found=f"{len(hidden)} files with a leading dot", expected="none"
        )
    here = [name for name in here if not is_hidden(name)]
    safe = [name for name in here if name.endswith(".safetensors")]
    pickled = [
        name for name in here
        if (name.endswith(".bin") and not name.endswith(_NOT_WEIGHTS)) or _STATES.fullmatch(name)
    ]  # fmt: skip
    siblings = ADAPTERS if source.is_adapter else MODELS
    usual = weights.single if len(weights.files) == 1 else index_of(weights.single)
    for name in safe + pickled:
        if name in siblings or (_COUNTED.fullmatch(name) and name.startswith("pytorch_model")):
            continue  # a second set of the same weights: `TWO_WEIGHT_SETS`
        if source.kind is Kind.MIXTURE and name in ADAPTERS:
            continue  # reported once, for the folder
        # With params.json beside it, this is Mistral's own format, published on purpose.
        meant = name.startswith(_MISTRAL) and "params.json" in source.folder.files
        taken = not source.is_adapter and _vllm_takes(name, weights) and not meant
        if TRAINER_STATE.fullmatch(name) and not taken:
            continue
        head = name in SIDE_FILES
        yield Files.STRAY_WEIGHT_FILE.at(
            name,
            found="a value head beside the model" if head else "not part of the checkpoint",
            expected=f"only {usual}",
            severity=Severity.ERROR if taken else Severity.WARNING,
        )


def _vllm_takes(name: str, weights: Weights) -> bool:
    """Return True if vLLM 0.32 loads the file (`default_loader._prepare_weights`)."""
    if name.startswith(_MISTRAL) and name.endswith(".safetensors"):
        return True
    if weights.is_pickled:
        return name.endswith(".bin")  # every .bin, if there are no safetensors
    return name.endswith(".safetensors") and weights.index is None


def other_set(source: Source) -> Weights | None:
    """Return the set of weights that loaders do not use (`.bin` or safetensors), or None.

    OpenRLHF under ZeRO-3 writes the gathered tensors as `.bin`. If it is killed at the wrong
    moment, it leaves PEFT's empty safetensors beside them, which every loader prefers.
    """
    names = ADAPTERS if source.is_adapter else MODELS
    if source.weights.single not in names:
        return None
    other_name = next(name for name in names if name != source.weights.single)
    weights = open_weights(source.folder, other_name)
    return weights if weights.files else None


def is_broken(weights: Weights) -> bool:
    """Return True if a file or tensor is missing, or a tensor is empty."""
    empty = any(not tensor.numel for tensor in weights.tensors.values())
    return empty or not weights.tensors or not weights.is_whole


def intact_beside(source: Source) -> str:
    """Return the name of an intact set of weights beside broken ones; "" if there is none."""
    if not is_broken(source.weights):
        return ""
    beside = other_set(source)
    return beside.single if beside is not None and not is_broken(beside) else ""
