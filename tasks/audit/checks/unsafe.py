"""Check for files that run code: pickles, and code that comes with a model."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.audit.catalogue.files import Unsafe
from tasks.audit.finding import Finding, some
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError
from tasks.weights.files.index import is_hidden
from tasks.weights.pickled.allowed import TENSORS, TRAINERS
from tasks.weights.pickled.scan import Scanned, Scanner

_DOCUMENTS = ("config.json", "tokenizer_config.json", "processor_config.json")
_DEEPSPEED_SCRIPT = "zero_to_fp32.py"
"""DeepSpeed copies this script into every checkpoint; no loader runs it."""


def check(source: Source) -> Iterator[Finding]:
    """Check pickles, those of the weights first, then code."""
    weights = source.weights
    if weights.is_pickled and weights.files:
        yield Unsafe.PICKLED_WEIGHTS.at(
            weights.files[0], found=f"{len(weights.files)} pickled files", expected="safetensors"
        )
    scanner = Scanner()
    first = {name: number for number, name in enumerate(weights.files)}
    for name in sorted(source.folder.files, key=lambda name: (first.get(name, len(first)), name)):
        if (source.folder.root / name).exists():  # a repair lists files that it will write
            yield from _pickles(source, name, scanner)
    yield from _code(source)


def _pickles(source: Source, name: str, scanner: Scanner) -> Iterator[Finding]:
    """Check what loading a file would run; every file, since loaders do not go by names."""
    try:
        scanned = scanner.scan(source.folder.root / name)
    except ArtifactError as error:
        scanned = Scanned(unreadable=[error.message.removeprefix(f"{source.folder.root / name}: ")])
    calls = sorted(scanned.names - TENSORS - TRAINERS)
    classes = sorted(scanned.names & TRAINERS)
    if calls:
        yield Unsafe.PICKLE_CALLS.at(name, found=some(calls), expected="only names of torch")
    if scanned.unreadable and not is_hidden(name):  # `._x` of macOS holds no pickle
        reasons = "; ".join(scanned.unreadable)
        yield Unsafe.PICKLE_OPAQUE.at(name, found=reasons, expected="a file that can be analysed")
    if classes and not calls:
        yield Unsafe.PICKLE_CLASSES.at(name, found=some(classes), expected="only tensors")


def _code(source: Source) -> Iterator[Finding]:
    for name in _DOCUMENTS:
        auto_map = source.config(name).get("auto_map")
        if auto_map:
            classes = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
            names = ", ".join(str(value) for value in classes)
            yield Unsafe.REMOTE_CODE.at(name, found=f"auto_map: {names}", expected="no auto_map")
    files = [
        name
        for name in source.folder.here()
        if name.endswith((".py", ".so", ".pyc")) and name != _DEEPSPEED_SCRIPT
    ]
    if files:
        yield Unsafe.REMOTE_CODE.at(
            files[0], files, found="code", expected="no code in a checkpoint"
        )
