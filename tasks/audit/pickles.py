"""List the names that a pickle would call, without running it.

`pickletools.genops` decodes one instruction after the other and runs none. Names are resolved as
the pickle machine would: `GLOBAL` contains its name, `STACK_GLOBAL` takes the last two strings,
which may come from the memo.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.archive import read_archive

MAX_BYTES = 8 << 20
MAX_STEPS = 1_500_000
"""About 2 s."""
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
"""Modules that run, fetch or build code and that no checkpoint needs."""
_HARMLESS = {
    "builtins.set", "builtins.dict", "builtins.list", "builtins.int", "builtins.float",
    "builtins.bool", "builtins.slice", "builtins.range", "builtins.complex", "builtins.bytearray",
    "builtins.frozenset", "builtins.object", "builtins.tuple", "builtins.str", "builtins.bytes",
    "__builtin__.set", "__builtin__.dict", "__builtin__.object", "functools.partial",
}  # fmt: skip
"""`functools.partial` only binds another name, which is checked too."""
_RUNS = {
    "torch.hub", "torch.jit", "torch.utils.cpp_extension", "torch.package", "torch.load",
    "torch.serialization.load", "torch.storage._load_from_bytes", "numpy.load", "numpy.testing",
    "numpy.f2py", "numpy.distutils", "torch.utils.bottleneck", "torch.utils.collect_env",
    "torch.distributed.launch", "torch.distributed.run", "torch._inductor", "torch.os",
}  # fmt: skip
"""Parts of allowed modules that run code or load other files."""


def called(path: Path) -> set[str]:
    """Return the dotted names that a pickle mentions, in a zip file of torch or on its own.

    Raises:
        ArtifactError: it is damaged or too long, or its names cannot be determined.
    """
    return set(_names(path, _pickle(path)))


def runs_code(name: str) -> bool:
    """Return True if loading this name runs or fetches code, or loads another file."""
    if name in _HARMLESS:
        return False
    if any(name == module or name.startswith(f"{module}.") for module in _RUNS):
        return True
    return name.partition(".")[0] in _CODE


def is_plain(name: str) -> bool:
    """Return True if a state dict may contain this name."""
    return name in _HARMLESS or name.partition(".")[0] in _PLAIN


def _pickle(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(MAX_BYTES + 1)
    if start[:4] != b"PK\x03\x04":
        if len(start) > MAX_BYTES:
            # Only data follows the program: tensors, in torch's old format.
            start = start[:MAX_BYTES]
        return start
    return read_archive(path).read("data.pkl", MAX_BYTES)


def _names(path: Path, data: bytes) -> Iterator[str]:
    """Yield every name.

    Raises:
        ArtifactError: the two strings of a `STACK_GLOBAL` were not pushed one after the other, so
            they could be anything; or the pickle is damaged.
    """
    pushed: list[str] = []  # strings known to be on top of the stack
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
                raise ArtifactError(f"{path}: a name that is built while the file is loaded")
            else:
                if code.name == "STACK_GLOBAL":
                    yield f"{pushed[-2]}.{pushed[-1]}"
                elif code.name in ("GLOBAL", "INST"):
                    yield str(value).replace(" ", ".", 1)
                pushed.clear()
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ArtifactError(f"{path}: not a readable pickle: {error}") from error
