"""Build hostile files byte by byte: instructions of pickles, and the containers around them.

Nothing runs them.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from typing import Any

PROTO = b"\x80\x04"


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value.encode())]) + value.encode()


def name(module: str, qualified: str) -> bytes:
    return text(module) + text(qualified) + pickle.STACK_GLOBAL


def inner(value: Any) -> bytes:
    """Return the instructions that build a plain value."""
    return pickle.dumps(value, 3)[2:-1]


def reduce(module: str, qualified: str, *args: Any) -> bytes:
    """Return the instructions of a call."""
    return name(module, qualified) + inner(args) + pickle.REDUCE


def program(*parts: bytes) -> bytes:
    return PROTO + b"".join(parts) + pickle.STOP


def evil(*args: Any) -> bytes:
    return program(reduce("os", "system", *(args or ("echo pwned",))))


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for member, data in files.items():
            file.writestr(member, data)
    return buffer.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for member, data in files.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def array(data: bytes, descr: str = "|O") -> bytes:
    """Return a `.npy` file with a pickle behind its header."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def legacy(last: bytes, *, magic: bytes = b"") -> bytes:
    """Return a file in torch's format before 1.6 whose fifth pickle is `last`."""
    number = magic or pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    empty = pickle.dumps({}, 2)
    return number + pickle.dumps(1001, 2) + empty + pickle.dumps([], 2) + last
