"""Files that run code: pickles, and code that a model brings along."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.audit.catalogue import unsafe as say
from tasks.audit.finding import Finding
from tasks.audit.pickles import called, is_plain, runs_code
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_DOCUMENTS = ("config.json", "tokenizer_config.json", "processor_config.json")
_DEEPSPEED_SCRIPT = "zero_to_fp32.py"
"""DeepSpeed copies it into every checkpoint; no loader runs it."""
MAX_FILES = 32
"""Pickles whose instructions are gone through; a DeepSpeed checkpoint has hundreds, all alike."""


def check(source: Source) -> Iterator[Finding]:
    """Pickles, the weights' own first, then code."""
    weights = source.weights
    if weights.is_pickled and weights.files:
        yield say.PICKLED_WEIGHTS.at(
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
        said = str(error).removeprefix(f"{source.folder.root / name}: ")
        yield say.PICKLE_OPAQUE.at(name, found=said, expected="a pickle that can be gone through")
        return
    calls = sorted(one for one in names if runs_code(one))
    foreign = sorted(one for one in names if not is_plain(one))
    if calls:
        yield say.PICKLE_CALLS.at(name, found=", ".join(calls), expected="names of torch alone")
    elif foreign:
        yield say.PICKLE_CLASSES.at(name, found=", ".join(foreign[:3]), expected="tensors alone")


def _code(source: Source) -> Iterator[Finding]:
    for name in _DOCUMENTS:
        said = source.config(name).get("auto_map")
        if said:
            classes = said.values() if isinstance(said, dict) else [said]
            told = ", ".join(str(one) for one in classes)
            yield say.REMOTE_CODE.at(name, found=f"auto_map: {told}", expected="no auto_map")
    files = [
        name
        for name in source.folder.here()
        if name.endswith((".py", ".so", ".pyc")) and name != _DEEPSPEED_SCRIPT
    ]
    if files:
        yield say.REMOTE_CODE.at(files[0], files, found="code", expected="no code in a checkpoint")
