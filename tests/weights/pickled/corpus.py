"""Hostile files: the published test corpora of three scanners, rebuilt by their recipes, and ours.

Sources: picklescan (picklescan_corpus.py), trailofbits/fickling (test/test_bypasses.py,
test_crashes.py, test_scanner_deactivation_analysis.py, test_expansion_attack_analysis.py,
test_polyglot.py, test_scan_api.py), protectai/modelscan (tests/test_modelscan.py,
tests/test_utils.py). A case is the bytes of a file; nothing runs them.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import marshal
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np

from tests.weights.pickled.making import (
    PROTO,
    array,
    evil,
    inner,
    legacy,
    name,
    program,
    reduce,
    tarred,
    text,
    zipped,
)
from tests.weights.pickled.picklescan_corpus import of_picklescan


def of_fickling() -> Iterator[tuple[str, str, bytes]]:
    yield "GHSA-r7v6 pty, BUILD", "x.pkl", program(reduce("pty", "spawn", "id"), text("x"), b"b")
    yield "PR 108 OBJ", "x.pkl", b"(cpty\nspawn\nS'id'\no."
    code = marshal.dumps(compile("0", "x", "exec"))
    data = program(
        reduce("marshal", "loads", code), b"\x94", name("types", "FunctionType"), b"h\x00}\x86R)R"
    )
    yield "GHSA-565g marshal, types", "x.pkl", data
    for case, module, qualified in (
        ("GHSA-wfq2 runpy", "runpy", "run_path"), ("GHSA-p523 cProfile", "cProfile", "run"),
        ("GHSA-5hvc pydoc", "pydoc", "locate"),
        ("GHSA-q5qq code", "code", "InteractiveInterpreter"),
        ("GHSA-q5qq multiprocessing", "multiprocessing.util", "spawnv_passfds"),
        ("smtplib", "smtplib", "SMTP"), ("imaplib", "imaplib", "IMAP4"),
        ("ftplib", "ftplib", "FTP"),
        ("poplib", "poplib", "POP3"), ("telnetlib", "telnetlib", "Telnet"),
        ("nntplib", "nntplib", "NNTP"), ("GHSA-5hwf uuid", "uuid", "_get_command_stdout"),
        ("GHSA-5hwf aix", "_aix_support", "_read_cmd_output"),
        ("GHSA-5hwf osx", "_osx_support", "_find_build_tool"),
        ("GHSA-6ggj _interpreters", "_interpreters", "create"),
        ("GHSA-6ggj _xxsubinterpreters", "_xxsubinterpreters", "create"),
        ("remove_hook", "fickling.hook", "remove_hook"),
        ("deactivate_safe_ml", "fickling.hook", "deactivate_safe_ml_environment"),
        ("GHSA-f7qq asyncio", "asyncio.unix_events", "_UnixSubprocessTransport._start"),
    ):  # fmt: skip
        yield case, "x.pkl", program(reduce(module, qualified, "x"))
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
