"""What a pickle would call, told without running it: the names that its instructions mention.

`pickletools.genops` decodes one instruction after the other and does nothing with them. Names are
followed as the machine would: `GLOBAL` has its own, `STACK_GLOBAL` takes the last two texts, which
may come from the memo.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.archive import read_archive

MAX_BYTES = 8 << 20
MAX_STEPS = 1_500_000
"""Some 2 s."""
_STORES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_FETCHES = ("GET", "BINGET", "LONG_BINGET")
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING",
          "SHORT_BINSTRING")  # fmt: skip
_PLAIN = ("torch", "collections", "numpy", "_codecs", "deepspeed", "argparse")
_CODE = {
    "builtins", "__builtin__", "os", "posix", "nt", "subprocess", "sys", "socket", "shutil",
    "runpy", "importlib", "imp", "pickle", "_pickle", "cloudpickle", "dill", "ctypes", "pty",
    "commands", "webbrowser", "code", "codeop", "asyncio", "multiprocessing", "types", "operator",
    "functools", "marshal", "pip", "platform", "signal", "tempfile", "urllib", "requests", "http",
    "ftplib", "smtplib", "telnetlib", "base64", "inspect", "pdb", "timeit", "trace", "bdb", "site",
}  # fmt: skip
"""Modules that no checkpoint needs and that run, fetch or build code."""
_HARMLESS = {
    "builtins.set", "builtins.dict", "builtins.list", "builtins.int", "builtins.float",
    "builtins.bool", "builtins.slice", "builtins.range", "builtins.complex", "builtins.bytearray",
    "builtins.frozenset", "builtins.object", "builtins.tuple", "builtins.str", "builtins.bytes",
    "__builtin__.set", "__builtin__.dict", "__builtin__.object", "functools.partial",
}  # fmt: skip
"""`functools.partial` only binds what is named beside it."""
_RUNS = {
    "torch.hub", "torch.jit", "torch.utils.cpp_extension", "torch.package", "torch.load",
    "torch.serialization.load", "torch.storage._load_from_bytes", "numpy.load", "numpy.testing",
    "numpy.f2py", "numpy.distutils", "torch.utils.bottleneck", "torch.utils.collect_env",
    "torch.distributed.launch", "torch.distributed.run", "torch._inductor", "torch.os",
}  # fmt: skip
"""Of modules that checkpoints do name, what runs or loads other things."""


def called(path: Path) -> set[str]:
    """Dotted names of what a pickle mentions, in a zip file as torch writes it or bare.

    Raises:
        ArtifactError: it is damaged, too long, or its names cannot be told.
    """
    return set(_names(path, _pickle(path)))


def runs_code(name: str) -> bool:
    """Whether loading what has this name runs, fetches or loads something else."""
    if name in _HARMLESS:
        return False
    if any(name == one or name.startswith(f"{one}.") for one in _RUNS):
        return True
    return name.partition(".")[0] in _CODE


def is_plain(name: str) -> bool:
    """Whether a state of tensors may have it."""
    return name in _HARMLESS or name.partition(".")[0] in _PLAIN


def _pickle(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(MAX_BYTES + 1)
    if start[:4] != b"PK\x03\x04":
        if len(start) > MAX_BYTES:
            # What comes after the program (tensors, in torch's old format) is data.
            start = start[:MAX_BYTES]
        return start
    return read_archive(path).read("data.pkl", MAX_BYTES)


def _names(path: Path, data: bytes) -> Iterator[str]:
    """Every name, or an error: texts that reach `STACK_GLOBAL` by any other way than being pushed
    one after the other could be any two texts."""
    pushed: list[str] = []  # texts on top of the stack, as far as that is certain
    memo: dict[int, str] = {}
    stored = 0
    try:
        for steps, (code, value, _) in enumerate(pickletools.genops(data)):
            if steps > MAX_STEPS:
                raise ArtifactError(f"{path}: more than {MAX_STEPS} instructions")
            if code.name in _STORES:
                at = stored if value is None else int(str(value))
                stored += 1
                memo.pop(at, None)
                if pushed:
                    memo[at] = pushed[-1]
            elif code.name in _FETCHES and int(str(value)) in memo:
                pushed.append(memo[int(str(value))])
            elif code.name in _TEXTS:
                pushed.append(str(value))
            elif code.name == "STACK_GLOBAL" and len(pushed) < 2:
                raise ArtifactError(f"{path}: a name that is put together while it is loaded")
            else:
                if code.name == "STACK_GLOBAL":
                    yield f"{pushed[-2]}.{pushed[-1]}"
                elif code.name in ("GLOBAL", "INST"):
                    yield str(value).replace(" ", ".", 1)
                pushed.clear()
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ArtifactError(f"{path}: no readable pickle: {error}") from error
