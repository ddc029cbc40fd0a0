"""The folder: its kind, its documents, links and manifest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tasks.audit.check import ERROR, INFO, READ, WARNING, Fault, check, some
from tasks.audit.folder import by_number
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Kind, Source, command, deliver
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import MANIFEST, open_artifact, verify
from tasks.weights.files.reader import index_of, is_hidden
from tasks.weights.files.side_files import PROCESSORS
from tasks.weights.shards import PARTITIONS

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
        for name in sorted(source.folder.listing.folders, key=by_number)
        if any(f"{name}/{config}" in source.folder.files for config in (CONFIG, ADAPTER_CONFIG))
    ]
    contents = f"; it contains {some(inside)}" if inside else ""
    fix = command("audit", source=source.folder.root / inside[-1]) if inside else ""
    expected = f"{CONFIG} or {ADAPTER_CONFIG}, and weights"
    yield Fault(source.recognised.what + contents, expected, fix=fix)


_CONVERSIONS = {
    "verl's FSDP": "python -m verl.model_merger merge --backend fsdp --local_dir {root} "
    "--target_dir <a new folder>",
    "Megatron": "Megatron-Bridge's AutoBridge.export_ckpt, or the trainer's own export to Hugging "
    "Face",
    GGUF: "serve it with llama.cpp or Ollama, and compare the server with the folder that it was "
    "converted from: plumbline verify url=<its address> source=<that folder>",
    "raw torch state dict": "load it into its class and save that: model.load_state_dict(torch."
    "load(FILE, weights_only=True)); model.save_pretrained(<a new folder>)",
}
"""Conversion of a checkpoint, by a part of its description."""


@check(
    "FOREIGN_FORMAT", ERROR,
    why="it is a trainer's own layout, a raw state dict or another runtime's format",
    fix="convert it with the tool that wrote it",
    issues="vLLM #2386, verl #1679, verl #2262",
)  # fmt: skip
def foreign_format(source: Source) -> Iterator[Fault]:
    """A checkpoint that transformers, peft and vLLM do not load as it is."""
    if source.kind is not Kind.FOREIGN:
        return
    what, root = source.recognised.what, shlex.quote(str(source.folder.root))
    fix = next((how.format(root=root) for part, how in _CONVERSIONS.items() if part in what), "")
    # GGUF is the format of llama.cpp and Ollama, which read it as it is.
    severity = INFO if GGUF in what else None
    yield Fault(what, f"{CONFIG} and safetensors", fix=fix, severity=severity)


@check(
    "MIXTURE", ERROR,
    why="every loader picks one of the two: vLLM streams the adapter into the model and fails",
    fix="move adapter_config.json and adapter_model.* into a folder of their own",
    issues="LLaMA-Factory #7511, LLaMA-Factory #4896, verl #7285",
)  # fmt: skip
def mixture(source: Source) -> Iterator[Fault]:
    """A full model and an adapter in one folder, or parts of both."""
    what, files = source.recognised.what, source.folder.files
    if source.kind is Kind.MIXTURE:
        yield Fault(what, "the adapter in a separate folder")
    if source.is_adapter and CONFIG in files:  # OpenRLHF writes it into every adapter
        fix = "remove config.json from the adapter's folder"
        yield Fault("present", f"only {ADAPTER_CONFIG}", CONFIG, severity=WARNING, fix=fix)
    for name in () if source.is_adapter else files:
        if name.endswith(f"lora_adapter/{ADAPTER_CONFIG}"):
            folder = name.removesuffix(f"/{ADAPTER_CONFIG}")
            yield Fault(
                f"{what}, and an adapter", "the adapter merged, or in a separate folder", folder,
                severity=WARNING, fix=deliver(source.folder.root / folder, "<base>"),
                why="verl's merger writes the base as the merged model, and the trained part here",
            )  # fmt: skip


@check(
    "CONFIG_MISSING", ERROR,
    why="transformers, peft and vLLM refuse the folder before they read a tensor",
    fix="copy the configuration from the trainer's output, or from the base for a full model",
    issues="unsloth #1191",
)  # fmt: skip
def config_missing(source: Source) -> Iterator[Fault]:
    """Weights without a configuration file."""
    name = ADAPTER_CONFIG if source.is_adapter else CONFIG
    if (source.is_adapter or source.is_model) and name not in source.folder.files:
        yield Fault("no such file", name, file=name)
    parts = source.kind is Kind.SHARDS and source.config(PARTITIONS).get("mode") == "adapter"
    if parts and ADAPTER_CONFIG not in source.folder.files:
        expected = f"{ADAPTER_CONFIG}, or adapter_config=FILE when you gather"
        yield Fault("no such file", expected, file=ADAPTER_CONFIG, severity=WARNING)


@check(
    "UNSAFE_FILE", ERROR,
    why="a loader that opens it fails, waits for ever, or publishes a file of this machine",
    fix="remove it, or replace it with a regular file",
)  # fmt: skip
def unsafe_file(source: Source) -> Iterator[Fault]:
    """A link or an index that leads out of the folder, a broken link, a pipe, or endless files."""
    listing, expected = source.folder.listing, "a file, or a link inside the folder"
    for name, reason in list(listing.unsafe.items())[:_MOST]:
        yield Fault(reason, expected, file=name)
    odd = [name for name in listing.odd if not is_hidden(name)]
    for name in odd[:_MOST]:
        yield Fault(listing.odd[name], expected, file=name, severity=WARNING)
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
    if source.recognised.manifest:
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
    if source.recognised.manifest and "MANIFEST_DIFFERS" not in source.codes:
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
