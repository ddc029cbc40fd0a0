"""The folder: its kind, its documents, links and manifest; checkpoints that are not gathered."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tasks.audit.check import ERROR, INFO, READ, WARNING, Fault, check, some
from tasks.audit.folder import by_number
from tasks.audit.source import ADAPTER_CONFIG, ADAPTERS, CONFIG, MODELS, Kind, Source, deliver
from tasks.core.errors import ArtifactError
from tasks.core.terminal import command
from tasks.pipeline.artifact import MANIFEST, open_artifact, verify
from tasks.weights.distributed import DistributedCheckpoint, read_distributed
from tasks.weights.files.folder import PROCESSORS
from tasks.weights.files.reader import index_of, is_hidden
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
    fix = command("audit", source=source.folder.root / inside[-1]) if inside else ""
    expected = f"{CONFIG} or {ADAPTER_CONFIG}, and weights"
    yield Fault(source.what + contents, expected, fix=fix)


_CONVERSIONS = {
    # part of the description: conversion
    "verl's FSDP": "python -m verl.model_merger merge --backend fsdp --local_dir {root} "
    "--target_dir <a new folder>",
    "Megatron": "Megatron-Bridge's AutoBridge.export_ckpt",
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
        root = shlex.quote(str(source.folder.root))
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
                severity=WARNING, fix=deliver(source.folder.root / folder, "<base>"),
                why="verl's merger writes the base as the merged model, and the trained part here",
            )  # fmt: skip


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
            open_artifact(source.folder.root)
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
        for difference in verify(open_artifact(source.folder.root))[:_MOST]:
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
    read, root, expected = source.once(_read), source.folder.root, "an adapter or a model"
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
        base = source.base.folder.root if source.base is not None else "<base>"
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
    read, root = source.once(_read), source.folder.root
    for message in read if isinstance(read, list) else ():
        text = message.replace(f"{root}/", "").removeprefix(f"{root}: ")
        yield Fault(text, "the files of all ranks of one step")


def _read(
    source: Source,
) -> ZeroCheckpoint | DistributedCheckpoint | Partitions | list[str] | None:
    """Read the partitions; returns the reasons as a list if they are unusable."""
    try:
        if source.kind is Kind.SHARDS:
            return read_partitions(source.folder.root)
        if source.kind is Kind.DISTRIBUTED:
            return read_distributed(source.folder.root)
        if source.kind is Kind.DEEPSPEED:
            return read_zero(source.folder.root)
    except ArtifactError as error:
        return list(error.details) or [error.message]
    return None
