"""The folder itself: is it a checkpoint at all, and can its documents be read."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.audit.catalogue import folder as say
from tasks.audit.finding import Finding, some
from tasks.audit.folder import by_number
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG, Kind
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import MANIFEST, open_artifact
from tasks.weights.files.index import index_of

_READ = (
    CONFIG, ADAPTER_CONFIG, "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json",
)  # fmt: skip
"""Documents that loaders read. The index is looked at by another family."""
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_EDGE = 4096
"""Bytes of a tokenizer that are looked at, at each end."""


def check(source: Source) -> Iterator[Finding]:
    """What it is, what lies in it that is no file, which of its documents are none."""
    yield from _kind(source)
    listing = source.folder.listing
    for name, reason in list(listing.odd.items())[:20]:
        yield say.ODD_ENTRY.at(name, found=reason, expected="a file or a folder")
    if listing.cut:
        yield say.LISTING_CUT.at("", found=listing.cut, expected="the files of one checkpoint")
    yield from _manifest(source)
    for name in _READ:
        source.config(name)
    source.folder.text(_TEMPLATE)
    yield from _tokenizer(source)
    index = index_of(source.weights.single)
    for name, reason in source.folder.wrong.items():
        if name != index:
            yield say.JSON_UNREADABLE.at(name, found=reason, expected="a document of its kind")


def _tokenizer(source: Source) -> Iterator[Finding]:
    """Whether it begins and ends as an object: taking the vocabulary apart costs twenty times its
    bytes in memory, and a copy that broke off shows at its end."""
    size = source.folder.files.get(_TOKENIZER)
    if size is None:
        return
    with (source.folder.root / _TOKENIZER).open("rb") as file:
        first = file.read(_EDGE).lstrip()[:1]
        file.seek(max(0, size - _EDGE))
        last = file.read(_EDGE).rstrip()[-1:]
    if (first, last) != (b"{", b"}"):
        yield say.JSON_UNREADABLE.at(
            _TOKENIZER, found=f"begins with {first!r}, ends with {last!r}", expected="{...}"
        )


def _kind(source: Source) -> Iterator[Finding]:
    what = source.recognised.what
    if source.kind is Kind.NOTHING and CONFIG not in source.folder.files:
        inside = list(_checkpoints_inside(source))
        fix = f"python flows/audit.py source={source.folder.root / inside[-1]}" if inside else ""
        held = f"; in it: {some(inside)}" if inside else ""
        yield say.NOTHING_HERE.at(
            "", found=what + held, expected=f"{CONFIG} or {ADAPTER_CONFIG}, and weights", fix=fix
        )
    elif source.kind is Kind.FOREIGN:
        yield say.FOREIGN_FORMAT.at(
            "", found=what, expected=f"{CONFIG} and safetensors", fix=_conversion(source)
        )
    elif source.kind is Kind.MIXTURE:
        yield say.MIXTURE.at("", found=what, expected="one of them in a folder of its own")
    if not source.is_adapter:
        for name in source.folder.files:
            if name.endswith(f"lora_adapter/{ADAPTER_CONFIG}"):
                folder = name.removesuffix(f"/{ADAPTER_CONFIG}")
                yield say.LORA_BESIDE_MODEL.at(
                    folder, found=f"{what}, and an adapter", expected="the adapter merged, or alone"
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
"""By a part of what was recognised: the command of the tool that converts it."""


def _conversion(source: Source) -> str:
    what, root = source.recognised.what, source.folder.root
    return next((how.format(root=root) for part, how in _CONVERSIONS if part in what), "")


def _manifest(source: Source) -> Iterator[Finding]:
    if source.recognised.manifest:
        try:
            open_artifact(source.folder.root)
        except ArtifactError as error:
            for one in (error.details or (error.message,))[:20]:
                yield say.MANIFEST_DIFFERS.at(MANIFEST, found=one, expected="as the manifest says")


def _checkpoints_inside(source: Source) -> Iterator[str]:
    """Folders right below that hold a configuration: what was probably meant, the newest last."""
    for name in sorted(source.folder.listing.folders, key=by_number):
        if any(f"{name}/{one}" in source.folder.files for one in (CONFIG, ADAPTER_CONFIG)):
            yield name
