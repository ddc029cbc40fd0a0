"""Weight files and their index: which files a loader opens, and if they fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check, some
from tasks.audit.pickles import TENSORS, TRAINERS, Scanned, Scanner
from tasks.audit.source import ADAPTERS, MODELS, Kind, Source
from tasks.core.errors import ArtifactError
from tasks.weights.files.reader import Weights, index_of, is_hidden
from tasks.weights.heads import SIDE_FILES

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


def has_weights(source: Source) -> bool:
    """Return True for folders whose weights are read by headers."""
    return source.is_model or source.is_adapter or source.kind is Kind.MIXTURE


@check(
    "INDEX_WRONG", ERROR, needs=(has_weights,),
    why="transformers stops, or initialises tensors at random that the index places wrongly",
    fix="rebuild it: {repair}",
    issues="transformers #40968, Relax PR #148, unsloth #1521, Automodel PR #3582, semble #222",
)  # fmt: skip
def index_wrong(source: Source) -> Iterator[Fault]:
    """Shards that are absent, or an index that is absent, unreadable, or of other files."""
    weights, index, name = source.weights, source.weights.index, index_of(source.weights.single)
    yield from _absent_files(weights)
    if name in source.folder.wrong:
        expected = '{"weight_map": {tensor: file}}'
        yield Fault(source.folder.wrong[name], expected, file=name, repairable=True)
        return
    if twice := weights.twice:
        first, second = next(iter(twice.values()))
        text = f"{len(twice)} tensors in {first} and in {second}"
        fix = "remove the file that is left over from an earlier save"
        yield Fault(text, "every tensor in one file", second, list(twice), fix=fix)
    if index is None:
        if len(weights.files) > 1:
            text = f"{len(weights.files)} shards without an index"
            yield Fault(text, name, file=name, repairable=True)
        return
    read = set(weights.files) - set(weights.unread)
    lost = [key for key, file in index.items() if file in read and key not in weights.tensors]
    if lost:
        text, fix = f"{len(lost)} tensors in no file", "take the index that was saved with them"
        yield Fault(text, "every tensor in its file", name, lost, fix=fix)
    moved = [
        key for key, file in weights.file_of.items() if key not in twice and index.get(key) != file
    ]
    if moved and not weights.strange:
        text = f"{len(moved)} tensors in another file than the index says, or not in the index"
        yield Fault(text, "every tensor in its file", name, moved, repairable=True)
    if weights.single in source.folder.files and weights.single not in weights.files:
        fix = "delete the index or the single file, whichever is left over from an earlier save"
        text = f"{weights.single} beside it"
        yield Fault(text, "one or the other", file=name, severity=WARNING, fix=fix)


def _absent_files(weights: Weights) -> Iterator[Fault]:
    """Yield shards that the index or the names of the others announce, and that do not exist."""
    fix = "copy the files again; from the hub: hf download <owner/name>"
    if weights.absent:
        text, count = some(weights.absent), len(weights.absent) + len(weights.files)
        text = f"{len(weights.absent)} files missing: {text}"
        yield Fault(text, f"all {count} files", file=index_of(weights.single), fix=fix)
    counted = [_COUNTED.fullmatch(name) for name in weights.files if weights.index is None]
    numbers = {int(match["number"]) for match in counted if match}
    total = max((int(match["all"]) for match in counted if match), default=0)
    missing = next((number for number in range(1, total + 1) if number not in numbers), None)
    if missing is not None:
        yield Fault(f"{len(numbers)} of {total} shards", f"also number {missing}", fix=fix)


@check(
    "STRAY_WEIGHT_FILE", ERROR, needs=(has_weights,),
    why="vLLM reads it too and stops; of two sets loaders read the safetensors, even if older",
    fix="move the file out of the folder, or into a subfolder",
    issues="LLaMA-Factory #8635, LLaMA-Factory #7511, unsloth #8566, OpenRLHF #651",
)  # fmt: skip
def stray_files(source: Source) -> Iterator[Fault]:
    """A weight file that is not part of the checkpoint, or the same weights in another format."""
    weights, names = source.weights, ADAPTERS if source.is_adapter else MODELS
    if weights.single == names[0]:
        second = [name for name in (names[1], index_of(names[1])) if name in source.folder.files]
        if second:
            text, fix = f"{weights.single} and {second[0]}", "delete the set that you do not want"
            yield Fault(text, "one of them", second[0], (), WARNING, fix=fix, repairable=True)
    usual = weights.single if len(weights.files) == 1 else index_of(weights.single)
    for name in source.folder.here():
        if name in (*weights.files, *weights.absent, *SIDE_FILES) or is_hidden(name):
            continue  # `heads` reports files with a head
        if name in names or (_COUNTED.fullmatch(name) and name.startswith("pytorch_model")):
            continue  # a second set of the same weights
        is_pickle = name.endswith(".bin") and not name.endswith(_NOT_WEIGHTS)
        is_weights = name.endswith(".safetensors") or is_pickle or _STATES.fullmatch(name)
        if not is_weights or (source.kind is Kind.MIXTURE and name in ADAPTERS):
            continue  # a mixture is reported once, for the folder
        # With params.json beside it, this is Mistral's own format, published on purpose.
        meant = name.startswith(_MISTRAL) and "params.json" in source.folder.files
        taken = not source.is_adapter and vllm_takes(name, weights) and not meant
        if taken or not TRAINER_STATE.fullmatch(name):
            severity, text = ERROR if taken else WARNING, "not part of the checkpoint"
            yield Fault(text, f"only {usual}", name, (), severity, repairable=True)


def vllm_takes(name: str, weights: Weights) -> bool:
    """Return True if vLLM 0.32 loads the file (`default_loader._prepare_weights`)."""
    if name.startswith(_MISTRAL) and name.endswith(".safetensors"):
        return True
    if weights.is_pickled:
        return name.endswith(".bin")  # every .bin, if there are no safetensors
    return name.endswith(".safetensors") and weights.index is None


@check(
    "BAD_HEADER", ERROR,
    why="`InvalidHeaderDeserialization` in every tool: an interrupted save, or no Git LFS",
    fix="copy or save the file again",
    issues="LLaMA-Factory #1910",
)  # fmt: skip
def bad_header(source: Source) -> Iterator[Fault]:
    """A weight file that is truncated, damaged, a pointer of Git LFS, or not a weight file."""
    for name, reason in source.weights.unread.items():
        with (source.folder.root / name).open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
        text = "a pointer of Git LFS" if is_pointer else reason
        fix = "git lfs pull" if is_pointer else ""
        yield Fault(text, "an intact file of tensors", file=name, fix=fix)


@check(
    "EMPTY_TENSOR", ERROR,
    why="ZeRO-3 or FSDP saved placeholders: `size mismatch`, or an adapter without effect",
    fix="delete it if a .bin beside it has the values; else gather DeepSpeed's shards: deliver",
    issues="OpenRLHF #651, OpenRLHF #682, OpenRLHF #920",
)  # fmt: skip
def empty_tensors(source: Source) -> Iterator[Fault]:
    """A weight file without tensors, or a tensor without elements in place of a matrix."""
    weights = source.weights
    holders = {*weights.file_of.values()}
    holders |= {second for _, second in weights.twice.values()}
    for name in weights.files:
        if name not in holders | weights.unread.keys():
            size = source.folder.files[name]
            yield Fault(f"{size} bytes, no tensors", "the trained tensors", file=name)
    empty = [key for key, tensor in weights.tensors.items() if not tensor.numel]
    if empty:
        shape = list(weights.tensors[empty[0]].shape)
        text = f"{len(empty)} of {len(weights.tensors)} tensors empty, shape {shape}"
        yield Fault(text, "a matrix, or a vector with elements", tensors=empty)


@check(
    "PICKLED_WEIGHTS", WARNING,
    why="a pickle is a program, which older versions of loaders run; others refuse parts of it",
    fix="write safetensors: {repair}",
    issues="OpenRLHF #651",
)  # fmt: skip
def pickled_weights(source: Source) -> Iterator[Fault]:
    """Weights as a pickle."""
    weights = source.weights
    if not weights.is_pickled or not weights.files:
        return
    strided = [key for key, t in source.tensors.items() if t.numel and not t.extents]
    text = f"{len(weights.files)} pickled files"
    text += f"; not tensors: {some(weights.others)}" if weights.others else ""
    text += f"; {len(strided)} tensors with other strides" if strided else ""
    yield Fault(text, "safetensors", weights.files[0], strided, repairable=not strided)


@check(
    "PICKLE_CALLS", ERROR,
    why="torch.load without weights_only=True and pickle.load run it with the user's rights",
    fix="do not load it; delete it, and tell its author; unpack an archive and audit that",
)  # fmt: skip
def pickle_calls(source: Source) -> Iterator[Fault]:
    """A pickle with a call or a class that no checkpoint needs, or that cannot be scanned.

    Every file is scanned, since loaders do not go by names.
    """
    scanner = Scanner()
    others = [name for name in source.folder.files if name not in source.weights.files]
    for name in (*source.weights.files, *others):
        path = source.folder.root / name
        try:
            scanned = scanner.scan(path)
        except ArtifactError as error:
            scanned = Scanned(unreadable=[error.message.removeprefix(f"{path}: ")])
        calls, classes = scanned.names - TENSORS - TRAINERS, scanned.names & TRAINERS
        if calls:
            yield Fault(some(sorted(calls)), "only names of torch", file=name)
        elif classes:
            fix = "do not pass it on with the model"
            yield Fault(some(sorted(classes)), "only tensors", name, severity=INFO, fix=fix)
        if scanned.unreadable and not is_hidden(name):  # `._x` of macOS holds no pickle
            text = "; ".join(scanned.unreadable)
            yield Fault(text, "a file that can be scanned", file=name)
