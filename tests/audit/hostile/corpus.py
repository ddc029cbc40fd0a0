"""Hostile files: the published test corpora of three scanners, rebuilt by their recipes, and ours.

Sources: mmaitre314/picklescan (tests/init_data_files.py), trailofbits/fickling
(test/test_bypasses.py, test_crashes.py, test_scanner_deactivation_analysis.py,
test_expansion_attack_analysis.py, test_polyglot.py, test_scan_api.py), protectai/modelscan
(tests/test_modelscan.py, tests/test_utils.py). A case is the bytes of a file; nothing runs them.

`corpus.txt` has a case on each line: source, name, file name, and its bytes as a literal, or as the
base85 of their zlib stream. `calls.txt` has those that are one call.
"""

from __future__ import annotations

import ast
import base64
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ARGUMENTS = {"picklescan": "__import__('os').system('whoami')", "fickling": "x"}


def cases() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (source, case, file name, bytes)."""
    for line in Path(__file__).with_name("corpus.txt").read_text().splitlines():
        source, case, file, text = line.split("\t")
        data = ast.literal_eval(text.removeprefix("zlib "))
        is_packed = text.startswith("zlib ")
        yield source, case, file, zlib.decompress(base64.b85decode(data)) if is_packed else data
    for line in Path(__file__).with_name("calls.txt").read_text().splitlines()[1:]:
        source, module, qualified, case = line.split(maxsplit=3)
        yield source, case, "x.pkl", program(reduce(module, qualified, _ARGUMENTS[source]))


def reduce(module: str, qualified: str, *args: Any) -> bytes:
    """Return the instructions of a call."""
    names = [pickle.SHORT_BINUNICODE + bytes([len(n)]) + n.encode() for n in (module, qualified)]
    return b"".join(names) + pickle.STACK_GLOBAL + pickle.dumps(args, 3)[2:-1] + pickle.REDUCE


def program(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + pickle.STOP


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for member, data in files.items():
            file.writestr(member, data)
    return buffer.getvalue()


def array(data: bytes, descr: str) -> bytes:
    """Return a `.npy` file with other data behind its header."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def legacy(last: bytes) -> bytes:
    """Return a file in torch's format before 1.6 whose fifth pickle is `last`."""
    first = [0x1950A86A20F9469CFC6C, 1001, {}, []]
    return b"".join(pickle.dumps(value, 2) for value in first) + last
