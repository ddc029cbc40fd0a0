"""The folder and its files: kind, documents, links, manifest, index, pickles, partitions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tasks.audit.check import ERROR, INFO, READ, WARNING, Fault, check, some
from tasks.audit.known import JINJA, is_multimodal, template_places, writes_chats
from tasks.audit.pickles import TENSORS, TRAINERS, Scanned, Scanner
from tasks.audit.source import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CONFIG,
    MODELS,
    Kind,
    Source,
    deliver,
)
from tasks.core.errors import ArtifactError
from tasks.core.files import by_number
from tasks.core.terminal import command
from tasks.pipeline.artifact import open_artifact, verify
from tasks.weights.distributed import DistributedCheckpoint, read_distributed
from tasks.weights.files.documents import MANIFEST
from tasks.weights.files.folder import PROCESSORS
from tasks.weights.files.reader import Weights, index_of, is_hidden
from tasks.weights.heads import SIDE_FILES
from tasks.weights.shards import PARTITIONS, Partitions, read_partitions
from tasks.weights.zero import ZeroCheckpoint, find_step, read_zero

GGUF = "GGUF"
_DOCUMENTS = (
    CONFIG, ADAPTER_CONFIG, "generation_config.json", "tokenizer_config.json", "tokenizer.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", *PROCESSORS,
)  # fmt: skip
"""Files that loaders read. `files` checks the index."""
_MOST = 20
"""Most findings of one kind about single files."""


@check(
    "NOTHING_HERE", ERROR,
    why="transformers, peft and vLLM find no configuration and no weights in it",
    fix="pass the folder that holds config.json or adapter_config.json",
    issues="unsloth #1191, LLaMA-Factory #4896",
)  # fmt: skip
def nothing_here(source: Source) -> Iterator[Fault]:
    """The folder holds no model, adapter or checkpoint of a known kind."""
    if source.kind is not Kind.NOTHING or CONFIG in source.folder.files:
        return
    inside = [
        name
        for name in sorted(source.folder.folders, key=by_number)
        if any(f"{name}/{file}" in source.folder.files for file in (*_DOCUMENTS[:2], "latest"))
    ]
    contents = f"; it contains {some(inside)}" if inside else ""
    fix = command("audit", source=source.root / inside[-1]) if inside else ""
    expected = f"{CONFIG} or {ADAPTER_CONFIG}, and weights"
    yield Fault(source.what + contents, expected, fix=fix)


_CONVERSIONS = {
    # part of the description: conversion
    "verl's FSDP": "python -m verl.model_merger merge --backend fsdp --local_dir {root} "
    "--target_dir <a new folder>",
    "Megatron": "Megatron-Bridge's AutoBridge.export_ckpt; verl's: python -m verl.model_merger "
    "merge --backend megatron",
    "MLX": "mlx_lm.fuse --model <base> --adapter-path {root} --save-path <a new folder>",
    GGUF: "serve it with llama.cpp or Ollama, and compare the server with the folder that it was "
    f"converted from: {command('verify')} url=<its address> source=<that folder>",
    "raw torch state dict": "load it into its class, and save that with save_pretrained",
}


@check(
    "FOREIGN_FORMAT", ERROR,
    why="it is a trainer's own layout, a raw state dict or another runtime's format",
    fix="convert it with the tool that wrote it",
    issues="vLLM #2386, verl #1679, verl #2262",
)  # fmt: skip
def foreign_format(source: Source) -> Iterator[Fault]:
    """A checkpoint that transformers, peft and vLLM do not load as it is."""
    if source.kind is Kind.FOREIGN:
        root = shlex.quote(str(source.root))
        fixes = [how.format(root=root) for part, how in _CONVERSIONS.items() if part in source.what]
        # GGUF is the format of llama.cpp and Ollama, which read it as it is.
        severity = INFO if GGUF in source.what else None
        expected = f"{CONFIG} and safetensors"
        yield Fault(source.what, expected, fix="".join(fixes[:1]), severity=severity)


@check(
    "MIXTURE", ERROR,
    why="every loader picks one of the two: vLLM streams the adapter into the model and fails",
    fix="move adapter_config.json and adapter_model.* into a folder of their own",
    issues="LLaMA-Factory #7511, LLaMA-Factory #4896, verl #7285",
)  # fmt: skip
def mixture(source: Source) -> Iterator[Fault]:
    """A full model and an adapter in one folder, or parts of both."""
    what, files = source.what, source.folder.files
    if source.kind is Kind.MIXTURE:
        yield Fault(what, "the adapter in a separate folder")
    for name in () if source.is_adapter else files:
        if name.endswith(f"lora_adapter/{ADAPTER_CONFIG}"):
            folder = name.removesuffix(f"/{ADAPTER_CONFIG}")
            yield Fault(
                f"{what}, and an adapter", "the adapter merged, or in a separate folder", folder,
                severity=WARNING, fix=deliver(source.root / folder, "<base>"),
                why="verl's merger writes the base as the merged model, and the trained part here",
            )  # fmt: skip


_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json",
)  # fmt: skip
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@check(
    "FILE_MISSING", WARNING,
    why="loaders refuse it, vLLM does not start or refuses chats",
    fix="copy it from the training run, and settings from the base; or save the checkpoint again",
    issues="unsloth #1191, LLaMA-Factory #2703, LLaMA-Factory #10410, LLaMA-Factory #10230, "
    "verl #7198, LLaMA-Factory #10396, EasyR1 PR #48, llm-compressor #1305",
)  # fmt: skip
def file_missing(source: Source) -> Iterator[Fault]:
    """No weights, no configuration, no tokenizer, chat template or settings of a processor."""
    name = ADAPTER_CONFIG if source.is_adapter else CONFIG
    if (source.is_adapter or source.is_model) and name not in source.folder.files:
        yield Fault("no such file", name, file=name, severity=ERROR)
    parts = source.kind is Kind.SHARDS and source.config(PARTITIONS).get("mode") == "adapter"
    if parts and ADAPTER_CONFIG not in source.folder.files:
        expected = f"{ADAPTER_CONFIG}, or adapter_config=FILE when you gather"
        yield Fault("no such file", expected, file=ADAPTER_CONFIG)
    if source.is_adapter and not (source.weights.files or source.weights.absent):
        yield Fault(f"only {ADAPTER_CONFIG}", " or ".join(ADAPTERS), severity=ERROR)
    if source.kind is Kind.NOTHING and CONFIG in source.folder.files:
        expected = f"{' or '.join(MODELS)}, or an index"
        yield Fault(f"{CONFIG} without weights", expected, severity=ERROR)
    files = source.folder.files.keys()
    if source.is_model and not files & {*_TOKENIZERS}:
        yield Fault("no tokenizer", " or ".join(_TOKENIZERS[:2]))
    if writes_chats(source) and _TOKENIZERS[0] in files and not source.once(template_places):
        lost = source.base is not None and bool(template_places(source.base))
        yield Fault("no chat template", JINJA, severity=None if lost else INFO)
    is_seeing = source.is_model and is_multimodal(source.config()) and source.tensors
    if is_seeing and not files & {*_PROCESSORS}:
        yield Fault("no processor configuration", "that of the base", file=_PROCESSORS[0])


@check(
    "UNSAFE_FILE", ERROR,
    why="a loader that opens it fails, waits for ever, or publishes a file of this machine",
    fix="remove it, or replace it with a regular file",
)  # fmt: skip
def unsafe_file(source: Source) -> Iterator[Fault]:
    """A link or an index that leads out of the folder, a broken link, a pipe, or endless files."""
    folder, expected = source.folder, "a file, or a link inside the folder"
    for name, reason in list(folder.unsafe.items())[:_MOST]:
        yield Fault(reason, expected, file=name)
    odd = [name for name in folder.odd if not is_hidden(name)]
    for name in odd[:_MOST]:
        yield Fault(folder.odd[name], expected, file=name, severity=WARNING)
    if source.weights.strange:
        names, file = some(source.weights.strange), index_of(source.weights.single)
        fix = "do not load it; ask its author"
        yield Fault(names, "plain names of files in the same folder", file=file, fix=fix)


@check(
    "MANIFEST_DIFFERS", ERROR,
    why="a file is not what was checked and measured: it was added, removed or changed",
    fix="make the artifact again, or restore it from its origin",
)  # fmt: skip
def manifest_differs(source: Source) -> Iterator[Fault]:
    """A Plumbline artifact whose files differ from its manifest."""
    if source.manifest:
        try:
            open_artifact(source.root)
        except ArtifactError as error:
            for difference in (error.details or (error.message,))[:_MOST]:
                yield Fault(difference, "as the manifest says", file=MANIFEST)


@check(
    "SHA256_DIFFERS", ERROR, needs=(READ,),
    why="the data is not what was checked and measured",
    fix="make the artifact again, or restore it from its origin",
)  # fmt: skip
def sha256_differs(source: Source) -> Iterator[Fault]:
    """Data that differs from the manifest."""
    if source.manifest and "MANIFEST_DIFFERS" not in source.codes:
        for difference in verify(open_artifact(source.root))[:_MOST]:
            yield Fault(difference, "the bytes that the manifest records", file=MANIFEST)


@check(
    "JSON_UNREADABLE", ERROR,
    why="loaders stop with a JSONDecodeError; an interrupted copy looks like this",
    fix="copy the file again from its origin",
)  # fmt: skip
def json_unreadable(source: Source) -> Iterator[Fault]:
    """A file that every loader reads is not a JSON object, or too large to be one."""
    for name in _DOCUMENTS:
        source.config(name)
    source.folder.text("chat_template.jinja")
    for name, reason in source.folder.wrong.items():
        if name != index_of(source.weights.single):
            yield Fault(reason, "a valid file", file=name)


@check(
    "CANNOT_JUDGE", ERROR,
    why="loaders read the same files with less care",
    fix="look at the file that is named; report a bug if a tool wrote it like this",
)  # fmt: skip
def cannot_judge(_: Source) -> Iterator[Fault]:
    """A check failed: a file has content that no known tool writes."""
    yield from ()  # `examine` reports it


@check(
    "ZERO_NOT_GATHERED", INFO,
    why="transformers, peft and vLLM find no weights in it; its trainer can resume from it",
    fix="{deliver}",
    issues="LLaMA-Factory #2604, LLaMA-Factory #2161",
)  # fmt: skip
def not_gathered(source: Source) -> Iterator[Fault]:
    """The partitions of every rank, complete, in place of a model or beside its saved weights."""
    read, root, expected = source.once(_read), source.root, "an adapter or a model"
    if isinstance(read, Partitions):
        text = f"{read.world_size} ranks, {len(read.tensors)} tensors, {read.mode}"
        fix = deliver(root, "<base>" if read.mode == "adapter" else None)
        yield Fault(text, expected, fix=fix)
    elif isinstance(read, ZeroCheckpoint | DistributedCheckpoint):
        text, has_base = f"{len(read.trained)} trained tensors", True
        if isinstance(read, ZeroCheckpoint):
            step = "" if read.step is None else f", step {read.step}"
            text = f"ZeRO-{read.stage} of {read.world_size} ranks, {text}{step}"
            has_base = any(".lora_" in name for name in read.trained)
        place = "" if read.root == root else read.root.name
        yield Fault(text, expected, place, fix=deliver(root, "<base>" if has_base else None))
    states = [text for text in source.beside if "DeepSpeed" in text]
    if states and (source.is_adapter or source.is_model):
        broken = not source.tensors or any(not each.numel for each in source.tensors.values())
        rest = ": the saved weights are broken, these may be intact" if broken else ""
        base = source.base.root if source.base is not None else "<base>"
        try:
            fix = deliver(find_step(root), base if source.is_adapter else None)
        except ArtifactError:
            fix = ""
        yield Fault(f"{states[0]} beside the saved weights{rest}", "one of them", fix=fix)


@check(
    "ZERO_UNUSABLE", ERROR,
    why="no tool can make a model of them, or it combines several runs into one that never was",
    fix="copy the files of every rank of one step again, or use another step",
    issues="OpenRLHF #1067, OpenRLHF PR #1208",
)  # fmt: skip
def unusable(source: Source) -> Iterator[Fault]:
    """Partitions that are incomplete, damaged, of several runs, or of another kind of training."""
    read, root = source.once(_read), source.root
    for message in read if isinstance(read, list) else ():
        text = message.replace(f"{root}/", "").removeprefix(f"{root}: ")
        yield Fault(text, "the files of all ranks of one step")


def _read(
    source: Source,
) -> ZeroCheckpoint | DistributedCheckpoint | Partitions | list[str] | None:
    """Read the partitions; returns the reasons as a list if they are unusable."""
    try:
        if source.kind is Kind.SHARDS:
            return read_partitions(source.root)
        if source.kind is Kind.DISTRIBUTED:
            return read_distributed(source.root)
        if source.kind is Kind.DEEPSPEED:
            return read_zero(source.root)
    except ArtifactError as error:
        return list(error.details) or [error.message]
    return None


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
        with (source.root / name).open("rb") as file:
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
        path = source.root / name
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
