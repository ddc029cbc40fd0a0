"""Check for files that run code: pickles, and code that comes with a model."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.audit.catalogue.files import Unsafe
from tasks.audit.finding import Finding
from tasks.audit.pickles import called, is_plain, runs_code
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_DOCUMENTS = ("config.json", "tokenizer_config.json", "processor_config.json")
_DEEPSPEED_SCRIPT = "zero_to_fp32.py"
"""DeepSpeed copies this script into every checkpoint; no loader runs it."""
MAX_FILES = 32
"""Most pickles to analyse; a DeepSpeed checkpoint has hundreds of the same kind."""


def check(source: Source) -> Iterator[Finding]:
    """Check pickles, those of the weights first, then code."""
    weights = source.weights
    if weights.is_pickled and weights.files:
        yield Unsafe.PICKLED_WEIGHTS.at(
            weights.files[0], found=f"{len(weights.files)} pickled files", expected="safetensors"
        )
    pickles = [name for name in source.folder.files if name.endswith(_PICKLES)]
    pickles.sort(key=lambda name: (name not in weights.files, name.count("/"), name))
    for name in pickles[:MAX_FILES]:
        yield from _pickle(source, name)
    yield from _code(source)


def _pickle(source: Source, name: str) -> Iterator[Finding]:
    try:
        names = called(source.folder.root / name)
    except (ArtifactError, OSError) as error:
        reason = str(error).removeprefix(f"{source.folder.root / name}: ")
        yield Unsafe.PICKLE_OPAQUE.at(name, found=reason, expected="a pickle that can be analysed")
        return
    calls = sorted(name for name in names if runs_code(name))
    foreign = sorted(name for name in names if not is_plain(name))
    if calls:
        yield Unsafe.PICKLE_CALLS.at(name, found=", ".join(calls), expected="only names of torch")
    elif foreign:
        yield Unsafe.PICKLE_CLASSES.at(name, found=", ".join(foreign[:3]), expected="only tensors")


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
