"""Check the folder itself: its kind, odd entries, manifest, signature, and JSON files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tasks.audit.catalogue.files import Folders
from tasks.audit.finding import Finding, some
from tasks.audit.folder import by_number
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG, Kind
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError
from tasks.core.terminal import typed
from tasks.pipeline.artifact import MANIFEST, SIGNATURE, open_artifact
from tasks.pipeline.signature import faults
from tasks.weights.files.index import index_of, is_hidden
from tasks.weights.files.side_files import PROCESSORS

_READ = (
    CONFIG, ADAPTER_CONFIG, "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", *PROCESSORS,
)  # fmt: skip
"""Files that loaders read. `files` checks the index."""
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_EDGE = 4096
"""Bytes of tokenizer.json to read at each end."""


def check(source: Source) -> Iterator[Finding]:
    """Check the kind of the folder, odd entries, manifest, signature, and the JSON files."""
    yield from _kind(source)
    listing = source.folder.listing
    odd = {name: why for name, why in listing.odd.items() if not is_hidden(name)}
    for name, reason in list(odd.items())[:20]:
        yield Folders.ODD_ENTRY.at(name, found=reason, expected="a file or a folder")
    for name, reason in list(listing.outside.items())[:20]:
        yield Folders.LINK_OUTSIDE.at(
            name,
            found=reason,
            expected="a file, or a link inside the folder",
            fix="remove it, or copy what it leads to: cp -rL "
            f"{shlex.quote(str(source.folder.root))} <a new folder>",
        )
    for name in listing.special[:20]:
        yield Folders.SPECIAL_FILE.at(
            name, found="a pipe, a socket or a device", expected="a file or a folder"
        )
    if listing.cut:
        yield Folders.LISTING_CUT.at("", found=listing.cut, expected="the files of one checkpoint")
    yield from _manifest(source)
    yield from _signature(source)
    for name in _READ:
        source.config(name)
    source.folder.text(_TEMPLATE)
    yield from _tokenizer(source)
    index = index_of(source.weights.single)
    for name, found in source.folder.twice.items():
        yield Folders.JSON_KEY_TWICE.at(name, found=found, expected="every key once")
    for name, reason in source.folder.wrong.items():
        if name != index:
            yield Folders.JSON_UNREADABLE.at(name, found=reason, expected="a valid file")


def _tokenizer(source: Source) -> Iterator[Finding]:
    """Check that tokenizer.json begins and ends as an object.

    Parsing the vocabulary takes twenty times its size in memory, and an interrupted copy shows at
    the end of the file.
    """
    size = source.folder.files.get(_TOKENIZER)
    if size is None:
        return
    with (source.folder.root / _TOKENIZER).open("rb") as file:
        first = file.read(_EDGE).lstrip()[:1]
        file.seek(max(0, size - _EDGE))
        last = file.read(_EDGE).rstrip()[-1:]
    if (first, last) != (b"{", b"}"):
        yield Folders.JSON_UNREADABLE.at(
            _TOKENIZER, found=f"begins with {first!r}, ends with {last!r}", expected="{...}"
        )


def _kind(source: Source) -> Iterator[Finding]:
    what = source.recognised.what
    if source.kind is Kind.NOTHING and CONFIG not in source.folder.files:
        inside = list(_checkpoints_inside(source))
        last = source.folder.root / inside[-1] if inside else ""
        fix = f"python flows/audit.py {typed('source', last)}" if inside else ""
        contents = f"; it contains {some(inside)}" if inside else ""
        yield Folders.NOTHING_HERE.at(
            "",
            found=what + contents,
            expected=f"{CONFIG} or {ADAPTER_CONFIG}, and weights",
            fix=fix,
        )
    elif source.kind is Kind.FOREIGN:
        yield Folders.FOREIGN_FORMAT.at(
            "", found=what, expected=f"{CONFIG} and safetensors", fix=_conversion(source)
        )
    elif source.kind is Kind.MIXTURE:
        yield Folders.MIXTURE.at("", found=what, expected="the adapter in a separate folder")
    if not source.is_adapter:
        for name in source.folder.files:
            if name.endswith(f"lora_adapter/{ADAPTER_CONFIG}"):
                folder = name.removesuffix(f"/{ADAPTER_CONFIG}")
                yield Folders.LORA_BESIDE_MODEL.at(
                    folder,
                    found=f"{what}, and an adapter",
                    expected="the adapter merged, or in a separate folder",
                )


_CONVERSIONS = (
    ("verl's FSDP", "python -m verl.model_merger merge --backend fsdp --local_dir {root} "
     "--target_dir <a new folder>"),
    ("distributed (FSDP)", "accelerate merge-weights {root} <a new folder>; for one file of a "
     "state dict: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {root} "
     "<file.pt>"),
    ("Megatron", "Megatron-Bridge's AutoBridge.export_ckpt, or the trainer's own export to "
     "Hugging Face (verl: python -m verl.model_merger merge --backend megatron)"),
    ("GGUF", "serve it with llama.cpp, or go back to the folder that it was converted from"),
    ("raw torch state dict", "load it into its class and save that: model.load_state_dict(torch."
     "load(FILE, weights_only=True)); model.save_pretrained(<a new folder>)"),
)  # fmt: skip
"""Part of the description of a folder, and the command that converts such a checkpoint."""


def _conversion(source: Source) -> str:
    what, root = source.recognised.what, source.folder.root
    return next(
        (how.format(root=shlex.quote(str(root))) for part, how in _CONVERSIONS if part in what), ""
    )


def _manifest(source: Source) -> Iterator[Finding]:
    if source.recognised.manifest:
        try:
            open_artifact(source.folder.root)
        except ArtifactError as error:
            for difference in (error.details or (error.message,))[:20]:
                yield Folders.MANIFEST_DIFFERS.at(
                    MANIFEST, found=difference, expected="as the manifest says"
                )


_SIGNATURE = {
    "SIGNATURE_MISSING": Folders.SIGNATURE_MISSING,
    "SIGNATURE_UNREADABLE": Folders.SIGNATURE_UNREADABLE,
    "SIGNED_BY_ANOTHER": Folders.SIGNED_BY_ANOTHER,
    "SIGNED_CHANGED": Folders.SIGNED_CHANGED,
    "SIGNED_REMOVED": Folders.SIGNED_REMOVED,
    "SIGNED_ADDED": Folders.SIGNED_ADDED,
}
"""Entries by the codes of `tasks.pipeline.signature`."""


def _signature(source: Source) -> Iterator[Finding]:
    if source.public_key is None:
        if SIGNATURE in source.folder.files:
            expected = "verify=<public key>"
            yield Folders.SIGNATURE_UNCHECKED.at(SIGNATURE, found="no key", expected=expected)
        return
    for fault in faults(source.folder.root, source.public_key)[:20]:
        entry = _SIGNATURE[fault.code]
        yield entry.at(fault.file, found=fault.found, expected=fault.expected)


def _checkpoints_inside(source: Source) -> Iterator[str]:
    """Yield direct subfolders with a configuration, the newest last."""
    for name in sorted(source.folder.listing.folders, key=by_number):
        if any(f"{name}/{config}" in source.folder.files for config in (CONFIG, ADAPTER_CONFIG)):
            yield name
