"""Weight files and their index: which files a loader opens, and if they fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check, some
from tasks.audit.folder import Weights, open_weights
from tasks.audit.repair import Draft
from tasks.audit.source import ADAPTER_CONFIG, ADAPTERS, CONFIG, MODELS, Kind, Source, commands_of
from tasks.core.errors import ArtifactError
from tasks.weights.files.reader import index_of, is_hidden
from tasks.weights.heads import SIDE_FILES
from tasks.weights.pickled.scan import TENSORS, TRAINERS, Scanned, Scanner
from tasks.weights.pickled.tensors import unnesting

_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files that vLLM excludes from *.bin (`filter_files_not_needed_for_inference`)."""
TRAINER_STATE = re.compile(
    r"training_args\.bin|(optimizer|scheduler|scaler|sampler|dl_state_dict)[^/]*\.(pt|bin)"
    r"|(rng_state|random_states)[^/]*\.(pth|pkl)|pytorch_model_fsdp[^/]*\.bin"
)
"""Files that the Trainers of transformers and accelerate save for resuming."""
_COUNTED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<all>\d{1,6})\.(safetensors|bin)")
_STATES = re.compile(r"(consolidated|model|pytorch_model)[^/]*\.pth?")
_MISTRAL = "consolidated"
_LFS = b"version https://git-lfs"
_MOST = 20


def has_weights(source: Source) -> bool:
    """Return True for folders whose weights are read by headers."""
    return source.is_model or source.is_adapter or source.kind is Kind.MIXTURE


@check(
    "WEIGHTS_MISSING", ERROR,
    why="`no file named model.safetensors` in transformers, `Cannot find any model weights` in "
    "vLLM; the save was interrupted, or hung because a rank was missing",
    fix="save again; if the trainer's own checkpoint is still there, gather that",
    issues="LLaMA-Factory #2703, LLaMA-Factory #10410, LLaMA-Factory #10230",
)  # fmt: skip
def weights_missing(source: Source) -> Iterator[Fault]:
    """A configuration without weights."""
    if source.is_adapter and not (source.weights.files or source.weights.absent):
        yield Fault(f"only {ADAPTER_CONFIG}", " or ".join(ADAPTERS))
    if source.kind is Kind.NOTHING and CONFIG in source.folder.files:
        yield Fault(f"{CONFIG} without weights", f"{' or '.join(MODELS)}, or an index")


@check(
    "TWO_WEIGHT_SETS", WARNING, needs=(has_weights,),
    why="transformers, peft and vLLM read the safetensors, even if the .bin is newer; OpenRLHF's "
    "ZeRO-3 save writes the .bin and, if interrupted, leaves empty safetensors beside it",
    fix="delete the set that you do not want",
    issues="OpenRLHF #651",
)  # fmt: skip
def two_weight_sets(source: Source) -> Iterator[Fault]:
    """The same weights twice: as safetensors and as .bin."""
    other = _other_name(source)
    there = [name for name in (other, index_of(other)) if name in source.folder.files]
    if there and not source.weights.is_pickled:
        yield Fault(f"{source.weights.single} and {there[0]}", "one", file=there[0])


@check(
    "INDEX_WRONG", ERROR, needs=(has_weights,),
    why="transformers reads the index first: it stops there, initialises tensors that it does not "
    "find at random, or does not load those that the index does not name; vLLM reads whole files",
    fix="rebuild it: {repair}",
    issues="transformers #40968, Relax PR #148, unsloth #1521",
)  # fmt: skip
def index_wrong(source: Source) -> Iterator[Fault]:
    """The index of the shards is absent, unreadable, or does not describe the files."""
    name = index_of(source.weights.single)
    for fault in _index_faults(source, name):
        repair = None if fault.fix else _rebuild
        yield replace(fault, file=name, repair=repair)


def _index_faults(source: Source, name: str) -> Iterator[Fault]:
    weights, index = source.weights, source.weights.index
    if name in source.folder.wrong:
        yield Fault(source.folder.wrong[name], '{"weight_map": {tensor: file}}')
        return
    if index is None:
        if len(weights.files) > 1:
            yield Fault(f"{len(weights.files)} shards without an index", name)
        return
    read = set(weights.files) - set(weights.unread)
    twice = {key for key, _, _ in weights.twice}
    lost = [key for key, file in index.items() if file in read and key not in weights.tensors]
    moved = [
        key
        for key, tensor in weights.tensors.items()
        if key not in twice and index.get(key, tensor.file) in read - {tensor.file}
    ]
    unknown = [key for key in weights.tensors if key not in index]
    again = "take the index that was written with the files, or save again"
    for keys, text, fix in (
        (lost, "in no file", again),
        (moved, "in another file than the index says", ""),
        (unknown, "not in the index", ""),
    ):
        if keys:
            text = f"{len(keys)} tensors {text}"
            yield Fault(text, "every tensor in its file", tensors=keys, fix=fix)
    if weights.single in source.folder.files and weights.single not in weights.files:
        fix = "delete the index or the single file, whichever is left over from an earlier save"
        yield Fault(f"{weights.single} beside it", "one or the other", severity=WARNING, fix=fix)
    metadata = source.config(name).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and weights.is_whole and total != weights.nbytes:
        # verl's distributed writer stores the number of elements there.
        yield Fault(f"total_size {total}", f"{weights.nbytes} bytes", severity=INFO)


def _rebuild(draft: Draft) -> None:
    draft.done.append(f"{index_of(draft.source.weights.single)} rebuilt")


@check(
    "INDEX_MISSING_FILE", ERROR, needs=(has_weights,),
    why="`Weight files referenced in index but missing` in vLLM, FileNotFoundError in "
    "transformers; without an index vLLM loads the shards that exist",
    fix="copy the files from the origin of the checkpoint",
)  # fmt: skip
def missing_files(source: Source) -> Iterator[Fault]:
    """Shards that the index or the names of the others announce, and that do not exist."""
    weights = source.weights
    if weights.absent:
        yield Fault(
            f"{len(weights.absent)} missing: {some(weights.absent)}",
            f"all {len(weights.absent) + len(weights.files)} files",
            file=index_of(weights.single),
        )
    numbers: dict[int, set[int]] = {}
    for name in weights.files if weights.index is None else ():
        if match := _COUNTED.fullmatch(name):
            numbers.setdefault(int(match["all"]), set()).add(int(match["number"]))
    for count, there in numbers.items():
        missing = next((number for number in range(1, count + 1) if number not in there), None)
        if missing is not None:
            yield Fault(f"{len(there)} of {count} shards", f"also number {missing}")


@check(
    "KEY_TWICE", ERROR, needs=(has_weights,),
    why="the loader and the order of the files decide which one is used",
    fix="remove the file that is left over from an earlier save",
)  # fmt: skip
def key_twice(source: Source) -> Iterator[Fault]:
    """A tensor in two files."""
    for key, first, second in source.weights.twice[:_MOST]:
        yield Fault(f"in {first} and in {second}", "in one", file=second, tensors=[key])


@check(
    "STRAY_WEIGHT_FILE", ERROR, needs=(has_weights,),
    why="vLLM reads every *.safetensors of a folder without an index, every *.bin of one without "
    "safetensors, and only consolidated*.safetensors if there is one: `There is no module or "
    "parameter named 'v_head' in Qwen3ForCausalLM`",
    fix="move the file out of the folder, or into a subfolder",
    issues="LLaMA-Factory #8635, LLaMA-Factory #7511, unsloth #8566",
)  # fmt: skip
def stray_files(source: Source) -> Iterator[Fault]:
    """A weight file that is not part of the checkpoint, and that a loader would read."""
    weights = source.weights
    known = {*weights.files, *weights.absent}
    here = [name for name in source.folder.here() if name not in known]
    hidden = [name for name in here if is_hidden(name) and name.endswith((".safetensors", ".bin"))]
    if hidden:
        yield Fault(
            f"{len(hidden)} files with a leading dot, as macOS writes them: {some(hidden)}",
            "none", file=hidden[0], severity=INFO, why="no loader reads them",
            fix="nothing; find DIR -name '._*' -delete removes those of macOS",
        )  # fmt: skip
    here = [name for name in here if not is_hidden(name)]
    safe = [name for name in here if name.endswith(".safetensors")]
    pickled = [
        name for name in here
        if (name.endswith(".bin") and not name.endswith(_NOT_WEIGHTS)) or _STATES.fullmatch(name)
    ]  # fmt: skip
    siblings = ADAPTERS if source.is_adapter else MODELS
    usual = weights.single if len(weights.files) == 1 else index_of(weights.single)
    for name in safe + pickled:
        if name in SIDE_FILES:
            continue  # HEAD_PLACE
        if name in siblings or (_COUNTED.fullmatch(name) and name.startswith("pytorch_model")):
            continue  # a second set of the same weights: `TWO_WEIGHT_SETS`
        if source.kind is Kind.MIXTURE and name in ADAPTERS:
            continue  # reported once, for the folder
        # With params.json beside it, this is Mistral's own format, published on purpose.
        meant = name.startswith(_MISTRAL) and "params.json" in source.folder.files
        taken = not source.is_adapter and vllm_takes(name, weights) and not meant
        if TRAINER_STATE.fullmatch(name) and not taken:
            continue
        yield Fault(
            "not part of the checkpoint", f"only {usual}", file=name,
            severity=ERROR if taken else WARNING,
            repair=lambda draft, name=name: draft.done.append(f"left out {name}"),
        )  # fmt: skip


def vllm_takes(name: str, weights: Weights) -> bool:
    """Return True if vLLM 0.32 loads the file (`default_loader._prepare_weights`)."""
    if name.startswith(_MISTRAL) and name.endswith(".safetensors"):
        return True
    if weights.is_pickled:
        return name.endswith(".bin")  # every .bin, if there are no safetensors
    return name.endswith(".safetensors") and weights.index is None


def _other_name(source: Source) -> str:
    """Return the name of the other format of the same weights."""
    names = ADAPTERS if source.is_adapter else MODELS
    single = source.weights.single
    return next(name for name in names if name != single) if single in names else ""


def _intact_beside(source: Source) -> Weights | None:
    """Return an intact set of weights beside broken ones.

    OpenRLHF under ZeRO-3 writes the gathered tensors as `.bin`. If it is killed at the wrong
    moment, it leaves PEFT's empty safetensors beside them, which every loader prefers.
    """
    other = _other_name(source)
    if not other or not _is_broken(source.weights):
        return None
    beside = open_weights(source.folder, other)
    return beside if beside.files and not _is_broken(beside) else None


def _is_broken(weights: Weights) -> bool:
    """Return True if a file or tensor is missing, or a tensor is empty."""
    empty = any(not tensor.numel for tensor in weights.tensors.values())
    return empty or not weights.tensors or not weights.is_whole


def _take_intact(draft: Draft) -> None:
    """Use the intact set of weights."""
    beside = _intact_beside(draft.source)
    if beside is not None:
        draft.done.append(
            f"weights of {beside.single}: those of {draft.source.weights.single} are broken"
        )
        recognised = replace(draft.source.recognised, weights=beside)
        draft.source = replace(draft.source, recognised=recognised)
        draft.names = {key: key for key in beside.tensors}


def _broken(source: Source, fault: Fault) -> Fault:
    """Return the fault of a broken file, with the repair by an intact set beside it."""
    intact = source.once(_intact_beside)
    if intact is None:
        return fault
    fix = f"use {intact.single}, which is intact: {commands_of(source)['repair']}"
    return replace(fault, fix=fix, repair=_take_intact)


@check(
    "BAD_HEADER", ERROR,
    why="`SafetensorError: InvalidHeaderDeserialization` or `MetadataIncompleteBuffer` in every "
    "tool; an interrupted save or copy looks like this, and so does a clone without LFS",
    fix="copy or save the file again",
    issues="LLaMA-Factory #1910",
)  # fmt: skip
def bad_header(source: Source) -> Iterator[Fault]:
    """A weight file that is truncated, damaged, a pointer of Git LFS, or not a weight file."""
    for name, reason in source.weights.unread.items():
        with (source.folder.root / name).open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
        if is_pointer:
            size = source.folder.files[name]
            text = f"a pointer of Git LFS of {size} bytes"
            yield Fault(text, "weights", file=name, fix="git lfs pull")
        else:
            yield _broken(source, Fault(reason, "an intact file of tensors", file=name))


@check(
    "NESTED_STATE_DICT", ERROR,
    why="transformers and vLLM look for tensors at the top level and find none: every weight is "
    "initialised at random, with a warning",
    fix="save the inner dictionary alone",
)  # fmt: skip
def nested_state_dict(source: Source) -> Iterator[Fault]:
    """A trainer's checkpoint under the name of a model's weights."""
    for name, key in source.weights.nested.items():
        yield Fault(
            f"the state dict under the key {key!r}",
            "tensors at top level",
            file=name,
            fix=unnesting(source.folder.root / name, key),
        )


@check(
    "EMPTY_TENSOR", ERROR,
    why="ZeRO-3 or FSDP saved the placeholders of one rank: `size mismatch ... torch.Size([0])` in "
    "peft and transformers, an IndexError in vLLM; peft loads a file of 40 bytes with a warning, "
    "and the adapter has no effect",
    fix="the values are not in this file; if DeepSpeed's shards are still there, gather them: "
    "plumbline deliver source=<the checkpoint> base=<base> out=<folder>",
    issues="OpenRLHF #651, OpenRLHF #682, OpenRLHF #920",
)  # fmt: skip
def empty_tensors(source: Source) -> Iterator[Fault]:
    """A weight file without tensors, or a tensor without elements in place of a matrix."""
    weights = source.weights
    holders = {tensor.file for tensor in weights.tensors.values()}
    holders |= {file for _, _, file in weights.twice}
    for name in weights.files:
        if name not in holders | weights.unread.keys() | weights.nested.keys():
            size = source.folder.files[name]
            text = f"{size} bytes, no tensors"
            yield _broken(source, Fault(text, "the trained tensors", file=name))
    empty: dict[str, list[str]] = {}
    for key, tensor in weights.tensors.items():
        if not tensor.numel:
            empty.setdefault(tensor.file, []).append(key)
    for file, keys in empty.items():
        count = sum(tensor.file == file for tensor in weights.tensors.values())
        shape = list(weights.tensors[keys[0]].shape)
        text = f"{len(keys)} of {count} tensors empty, shape {shape}"
        yield _broken(source, Fault(text, "a matrix, or a vector with elements", file, keys))


@check(
    "BIN_NOT_PLAIN", WARNING,
    why="`torch.load(weights_only=True)` refuses unknown classes, and loaders treat each entry as "
    "a tensor; converters to safetensors refuse tensors that are not contiguous",
    fix="save only {{name: tensor.contiguous() for name, tensor in model.state_dict().items()}}",
)  # fmt: skip
def bin_not_plain(source: Source) -> Iterator[Fault]:
    """A .bin file with entries that are not tensors, or with tensors that are not contiguous."""
    for name, others in source.weights.others.items():
        if others:
            yield Fault(f"not tensors: {some(others)}", "only tensors", file=name)
    strided: dict[str, list[str]] = {}
    for key, tensor in source.tensors.items():
        if tensor.numel and tensor.start < 0:
            strided.setdefault(tensor.file, []).append(key)
    for file, keys in strided.items():
        yield Fault(f"{len(keys)} with other strides", "C order", file, keys)


@check(
    "PICKLED_WEIGHTS", WARNING,
    why="a pickle is a program; vLLM, transformers and peft read it with weights_only=True, older "
    "versions run it. OpenRLHF saves a ZeRO-3 adapter like this",
    fix="write safetensors: {repair}",
    issues="OpenRLHF #651",
)  # fmt: skip
def pickled_weights(source: Source) -> Iterator[Fault]:
    """Weights as a pickle."""
    weights = source.weights
    if weights.is_pickled and weights.files:
        yield Fault(
            f"{len(weights.files)} pickled files", "safetensors", file=weights.files[0],
            repair=lambda draft: draft.done.append(f"{weights.single} as safetensors"),
        )  # fmt: skip


@check(
    "PICKLE_CALLS", ERROR,
    why="`torch.load` without weights_only=True, and pickle.load, run it with the rights of the "
    "user",
    fix="do not load it; delete it, and tell its author",
)  # fmt: skip
def pickle_calls(source: Source) -> Iterator[Fault]:
    """A pickle with a call, or a class, that no checkpoint needs."""
    for name, scanned in source.once(_pickles).items():
        if calls := sorted(scanned.names - TENSORS - TRAINERS):
            yield Fault(some(calls), "only names of torch", file=name)


@check(
    "PICKLE_OPAQUE", ERROR,
    why="nobody knows what it does when it is loaded",
    fix="do not load it; unpack an archive and audit the folder, delete any other file",
)  # fmt: skip
def pickle_opaque(source: Source) -> Iterator[Fault]:
    """A file that cannot be scanned for code: damaged, too long, or an unknown archive."""
    for name, scanned in source.once(_pickles).items():
        if scanned.unreadable and not is_hidden(name):  # `._x` of macOS holds no pickle
            yield Fault("; ".join(scanned.unreadable), "a file that can be analysed", file=name)


@check(
    "PICKLE_CLASSES", INFO,
    why="it loads only with weights_only=False, which runs any code in the file",
    fix="do not pass it on with the model",
)  # fmt: skip
def pickle_classes(source: Source) -> Iterator[Fault]:
    """A trainer's pickle that contains classes."""
    for name, scanned in source.once(_pickles).items():
        classes = sorted(scanned.names & TRAINERS)
        if classes and not scanned.names - TENSORS - TRAINERS:
            yield Fault(some(classes), "only tensors", file=name)


def _pickles(source: Source) -> dict[str, Scanned]:
    """Scan every file for pickles, since loaders do not go by names; those of the weights first."""
    scanner, scanned = Scanner(), {}
    first = {name: number for number, name in enumerate(source.weights.files)}
    for name in sorted(source.folder.files, key=lambda name: (first.get(name, len(first)), name)):
        path = source.folder.root / name
        if not path.exists():
            continue  # a repair lists files that it will write
        try:
            scanned[name] = scanner.scan(path)
        except ArtifactError as error:
            scanned[name] = Scanned(unreadable=[error.message.removeprefix(f"{path}: ")])
    return scanned


_CODE = ("config.json", "tokenizer_config.json", "processor_config.json")
_DEEPSPEED_SCRIPT = "zero_to_fp32.py"
"""DeepSpeed copies this script into every checkpoint; no loader runs it."""


@check(
    "REMOTE_CODE", WARNING,
    why="with trust_remote_code=True transformers and vLLM run it; without it they refuse the "
    "model",
    fix="read the code; if the class is one of transformers' own, remove auto_map",
    issues="LLaMA-Factory #9346",
)  # fmt: skip
def remote_code(source: Source) -> Iterator[Fault]:
    """The model contains its own code: auto_map, or Python files."""
    for name in _CODE:
        auto_map = source.config(name).get("auto_map")
        if auto_map:
            classes = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
            yield Fault(f"auto_map: {some(classes)}", "no auto_map", file=name)
    files = [
        name
        for name in source.folder.here()
        if name.endswith((".py", ".so", ".pyc")) and name != _DEEPSPEED_SCRIPT
    ]
    if files:
        yield Fault(f"code: {some(files)}", "no code in a checkpoint", file=files[0])
