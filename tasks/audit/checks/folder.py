"""The folder: its kind, its documents, links, manifest, signature, downloads."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check, some
from tasks.audit.folder import by_number
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Kind, Source, command
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import MANIFEST, SIGNATURE, open_artifact
from tasks.pipeline.signature import signature_problem
from tasks.weights.files.reader import index_of, is_hidden
from tasks.weights.files.side_files import PROCESSORS
from tasks.weights.shards import PARTITIONS

GGUF = "GGUF"
_DOCUMENTS = (
    CONFIG, ADAPTER_CONFIG, "generation_config.json", "tokenizer_config.json", "tokenizer.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", *PROCESSORS,
)  # fmt: skip
"""Files that loaders read. `files` checks the index."""
_TEMPLATE = "chat_template.jinja"
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
    yield Fault(
        source.recognised.what + contents,
        f"{CONFIG} or {ADAPTER_CONFIG}, and weights",
        fix=command("audit", source=source.folder.root / inside[-1]) if inside else "",
    )


_CONVERSIONS = (
    ("verl's FSDP", "python -m verl.model_merger merge --backend fsdp --local_dir {root} "
     "--target_dir <a new folder>"),
    ("Megatron", "Megatron-Bridge's AutoBridge.export_ckpt, or the trainer's own export to "
     "Hugging Face (verl: python -m verl.model_merger merge --backend megatron)"),
    (GGUF, "serve it with llama.cpp or Ollama, and compare the server with the folder that it was "
     "converted from: plumbline verify url=<its address> source=<that folder>"),
    ("raw torch state dict", "load it into its class and save that: model.load_state_dict(torch."
     "load(FILE, weights_only=True)); model.save_pretrained(<a new folder>)"),
)  # fmt: skip
"""Part of the description of a folder, and the command that converts such a checkpoint."""


@check(
    "FOREIGN_FORMAT", ERROR,
    why="they need safetensors or .bin files beside config.json; this is a trainer's own layout, "
    "a raw state dict or another runtime's format",
    fix="convert it with the tool that wrote it",
    issues="vLLM #2386, verl #1679, verl #2262",
)  # fmt: skip
def foreign_format(source: Source) -> Iterator[Fault]:
    """A checkpoint that transformers, peft and vLLM do not load as it is."""
    if source.kind is not Kind.FOREIGN:
        return
    what, root = source.recognised.what, shlex.quote(str(source.folder.root))
    fix = next((how.format(root=root) for part, how in _CONVERSIONS if part in what), "")
    # GGUF is the format of llama.cpp and Ollama, which read it as it is.
    severity = INFO if GGUF in what else None
    yield Fault(what, f"{CONFIG} and safetensors", fix=fix, severity=severity)


@check(
    "MIXTURE", ERROR,
    why="vLLM picks weights by pattern: without an index it streams the adapter into the model "
    "and fails with `There is no module or parameter named 'base_model'`; peft and transformers "
    "each load one of the two",
    fix="move adapter_config.json and adapter_model.* into a folder of their own",
    issues="LLaMA-Factory #7511, LLaMA-Factory #4896",
)  # fmt: skip
def mixture(source: Source) -> Iterator[Fault]:
    """A full model and an adapter in one folder."""
    if source.kind is Kind.MIXTURE:
        yield Fault(source.recognised.what, "the adapter in a separate folder")


@check(
    "LORA_BESIDE_MODEL", WARNING,
    why="verl's merger writes the base's weights as the merged model and puts the trained part "
    "into lora_adapter/: the weights alone are the model that training started from",
    fix="deliver the adapter in the subfolder",
    issues="verl #7285, verl #4553, verl #3087",
)  # fmt: skip
def lora_beside_model(source: Source) -> Iterator[Fault]:
    """An adapter in a subfolder, beside weights that may not include it."""
    names = () if source.is_adapter else source.folder.files
    for name in names:
        if name.endswith(f"lora_adapter/{ADAPTER_CONFIG}"):
            folder = name.removesuffix(f"/{ADAPTER_CONFIG}")
            adapter = source.folder.root / folder
            yield Fault(
                f"{source.recognised.what}, and an adapter",
                "the adapter merged, or in a separate folder",
                file=folder,
                fix=command("deliver", source=adapter, base="<base>", out=f"{adapter}-delivered"),
            )


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
    "ODD_ENTRY", WARNING,
    why="a loader that opens it fails; the audit did not open it",
    fix="replace it with a regular file, or remove it",
)  # fmt: skip
def odd_entry(source: Source) -> Iterator[Fault]:
    """A broken link, a link to a folder, or folders nested too deep among the files."""
    odd = {name: why for name, why in source.folder.listing.odd.items() if not is_hidden(name)}
    for name, reason in list(odd.items())[:_MOST]:
        yield Fault(reason, "a file or a folder", file=name)


@check(
    "UNSAFE_FILE", ERROR,
    why="a loader that follows it reads a file of this machine, which could hold a secret and "
    "would be published with the model, or waits for ever; the audit did not open it",
    fix="remove it, or replace it with a regular file",
)  # fmt: skip
def unsafe_file(source: Source) -> Iterator[Fault]:
    """A link or an index that leads out of the folder, a pipe, a device, or endless files."""
    copied = f"cp -rL {shlex.quote(str(source.folder.root))} <a new folder>"
    for name, reason in list(source.folder.listing.unsafe.items())[:_MOST]:
        is_link = (source.folder.root / name).is_symlink()
        fix = f"remove it, or copy what it leads to: {copied}" if is_link else ""
        yield Fault(reason, "a file, or a link inside the folder", file=name, fix=fix)
    if source.weights.strange:
        yield Fault(
            some(source.weights.strange),
            "plain names of files in the same folder",
            file=index_of(source.weights.single),
            fix="do not load it; ask its author",
        )


@check(
    "MANIFEST_DIFFERS", ERROR,
    why="the files are not those that were checked and measured: one was added, removed or changed",
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
    "SIGNATURE_WRONG", ERROR,
    why="every file of the model may have been changed since it was signed, or somebody else "
    "signed it",
    fix="restore the folder from its origin; or, if you made it, sign it: register.sign=<private "
    "key> of plumbline deliver",
)  # fmt: skip
def signature_wrong(source: Source) -> Iterator[Fault]:
    """A signature (OpenSSF Model Signing) that is missing, or does not fit the files or the key."""
    key = source.public_key
    if key is not None and (problem := signature_problem(source.folder.root, key)):
        yield Fault(problem, "the files that this key signed", file=SIGNATURE)


@check(
    "SIGNATURE_UNCHECKED", INFO,
    why="whether the model is the one that was signed is unknown",
    fix="run the audit with verify=<public key>",
)  # fmt: skip
def signature_unchecked(source: Source) -> Iterator[Fault]:
    """A signature that was not checked, since no key was given."""
    if source.public_key is None and SIGNATURE in source.folder.files:
        yield Fault("no key", "verify=<public key>", file=SIGNATURE)


@check(
    "JSON_UNREADABLE", ERROR,
    why="transformers and vLLM stop with a JSONDecodeError; an interrupted copy looks like this",
    fix="copy the file again from its origin",
)  # fmt: skip
def json_unreadable(source: Source) -> Iterator[Fault]:
    """A file that every loader reads is not a JSON object, or too large to be one."""
    _read(source)
    for name, reason in source.folder.wrong.items():
        if name != index_of(source.weights.single):
            yield Fault(reason, "a valid file", file=name)


def _read(source: Source) -> None:
    """Read all documents, which fills `wrong` of the folder."""
    for name in _DOCUMENTS:
        source.config(name)
    source.folder.text(_TEMPLATE)


@check(
    "CANNOT_JUDGE", ERROR,
    why="loaders read the same files with less care",
    fix="look at the file that the message names; report a bug if a tool wrote it like this",
)  # fmt: skip
def cannot_judge(_: Source) -> Iterator[Fault]:
    """A check failed: a file has content that no known tool writes."""
    yield from ()  # `examine` reports it


_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of blobs: git's SHA-1 of small files, the SHA-256 of those in LFS."""
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.\w+")
_LOCAL = ".cache/huggingface/download"
"""Folder of unfinished files below a folder of `hf download --local-dir`."""
_THREADS = 4


@check(
    "DOWNLOAD_INTERRUPTED", ERROR,
    why="the folder looks like a model and lacks files; loaders stop, or load what is there",
    fix="download it again: hf download <owner/name>",
    issues="Automodel PR #3582, semble #222",
)  # fmt: skip
def download_interrupted(source: Source) -> Iterator[Fault]:
    """A download from the Hugging Face Hub that did not finish."""
    root = source.folder.root
    places = [root / _LOCAL, *([root.parent.parent / "blobs"] if _is_snapshot(root) else [])]
    partial = [path for place in places for path in sorted(place.rglob("*.incomplete"))]
    shards = [_SHARD.fullmatch(name) for name in source.weights.files]
    lacking = any(shard and len(shards) < int(shard[2]) for shard in shards)
    if partial and (
        lacking or source.folder.listing.odd or source.weights.absent or source.kind is Kind.NOTHING
    ):
        yield Fault(
            f"unfinished: {some(path.name for path in partial)}",
            "all files of the repository",
            fix=_download(root),
        )


@check(
    "BLOB_DIFFERS", ERROR,
    why="something wrote through the link of the snapshot, or the transfer was corrupted: the "
    "model is not the published one",
    fix="download it again: hf download --force-download <owner/name>",
    issues="aprender #3971, huggingface_hub #3643",
)  # fmt: skip
def blob_differs(source: Source) -> Iterator[Fault]:
    """A file of a Hugging Face cache whose hash is not its name (with values=true)."""
    blobs = _blobs(source) if source.values else {}
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = dict(zip(blobs, pool.map(_hash, blobs.values()), strict=True))
    for name, digest in digests.items():
        if digest != blobs[name].name:
            yield Fault(
                f"hash {digest}",
                f"{blobs[name].name}, as the blob's name",
                file=name,
                fix=_download(source.folder.root, "--force-download"),
            )


def _is_snapshot(root: Path) -> bool:
    return root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir()


def _blobs(source: Source) -> Mapping[str, Path]:
    """Return the blobs whose names are hashes, by the name of the link."""
    links = {name: (source.folder.root / name).resolve() for name in source.folder.files}
    return {
        name: path
        for name, path in links.items()
        if path.parent.name == "blobs" and _HASH.fullmatch(path.name)
    }


def _hash(path: Path) -> str:
    """Return the hash of a blob, of the kind that its name is."""
    if len(path.name) == 40:
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(root: Path, *more: str) -> str:
    """Return the command that completes the folder."""
    if not _is_snapshot(root):
        return f"hf download <owner/name> {shlex.join([*more, '--local-dir', str(root)])}"
    repository = root.parent.parent
    name = repository.name.removeprefix("models--").replace("--", "/")
    cache = ["--revision", root.name, "--cache-dir", str(repository.parent)]
    return shlex.join(["hf", "download", name, *more, *cache])
