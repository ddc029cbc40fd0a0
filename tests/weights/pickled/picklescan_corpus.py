"""The test corpus of picklescan (mmaitre314/picklescan, tests/init_data_files.py), rebuilt."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from tests.weights.pickled.making import (
    array,
    evil,
    inner,
    legacy,
    name,
    program,
    reduce,
    text,
    zipped,
)

PAYLOAD = "__import__('os').system('whoami')"
CALLS = """
 GHSA-4r9r-ch6f-vxmx torch.utils.bottleneck.__main__ run_cprofile
 GHSA-86cj-95qr-2p4f torch._dynamo.guards GuardBuilder.get
 GHSA-f4x7-rfwp-v3xw torch.fx.experimental.symbolic_shapes ShapeEnv.evaluate_guards_expression
 GHSA-f745-w6jp-hpxx torch.utils.collect_env run
 GHSA-jhph-76pp-mggw torch.utils.collect_env run_and_read_all
 GHSA-h3qp-7fh3-f8h4 torch.utils.data.datapipes.utils.decoder basichandlers
 GHSA-vr7h-p6mm-wpmh torch.jit.unsupported_tensor_ops execWrapper
 GHSA-vv6j-3g6g-2pvj torch.utils._config_module ConfigModule.load_config
 GHSA-5qwp-399c-mjwf trace Trace.run
 GHSA-g344-hcph-8vgg trace Trace.runctx
 GHSA-x696-vm39-cp64 profile Profile.run
 GHSA-6vqj-c2q5-j97w profile Profile.runctx
 GHSA-f54q-57x4-jg88 lib2to3.pgen2.grammar Grammar.loads
 GHSA-3vg9-h568-4w9m idlelib.debugobj ObjectTreeItem.SetText
 GHSA-6w4w-5w54-rjvr idlelib.autocomplete AutoComplete.get_entity
 GHSA-7cq8-mj8x-j263 idlelib.autocomplete AutoComplete.fetch_completions
 GHSA-cj3c-v495-4xqh code InteractiveInterpreter.runcode
 GHSA-8r4j-24qv-fmq9 idlelib.calltip Calltip.fetch_tip
 GHSA-9xph-j2h6-g47v idlelib.calltip get_entity
 GHSA-4whj-rm5r-c2v8 torch.utils.bottleneck.__main__ run_autograd_prof
 GHSA-xp4f-hrf8-rxw7 ensurepip _run_pip
 GHSA-p9w7-82w4-7q8m lib2to3.pgen2.pgen ParserGenerator.make_label
 GHSA-vvpj-8cmc-gx39 pkgutil resolve_name
 GHSA-m869-42cg-3xwr idlelib.run Executive.runcode
 GHSA-j343-8v2j-ff7w idlelib.pyshell ModifiedInterpreter.runcommand
 GHSA-3gf5-cxq9-w223 idlelib.pyshell ModifiedInterpreter.runcode
 GHSA-fqq6-7vqf-w3fg doctest debug_script
 GHSA-9w88-8rmg-7g2p cProfile runctx
 GHSA-49gj-c84q-6qm9 cProfile run
 GHSA-7wx9-6375-f5wh profile run
 GHSA-q77w-mwjj-7mqx asyncio.unix_events _UnixSubprocessTransport._start
 GHSA-m273-6v24-x4m4 distutils.file_util write_file
 GHSA-4675-36f9-wf6r ctypes CDLL
 GHSA-vqmv-47xg-9wpr pty spawn
 GHSA-r8g5-cgf2-4m4m numpy.f2py.crackfortran getlincoef
 GHSA-g38g-8gr9-h9xp-uuid uuid _get_command_stdout
 GHSA-g38g-8gr9-h9xp-osx-support _osx_support _read_output
 GHSA-g38g-8gr9-h9xp-aix-support _aix_support _read_cmd_output
 GHSA-g38g-8gr9-h9xp-imaplib imaplib IMAP4_stream
 GHSA-g38g-8gr9-h9xp-pyrepl-pager _pyrepl.pager pipe_pager
 GHSA-g38g-8gr9-h9xp-test test.support.script_helper assert_python_ok
 io_FileIO _io FileIO
 urllib_request_urlopen urllib.request urlopen
 logging_FileHandler logging FileHandler
 malicious1 builtins eval
 malicious2 posix system
 malicious4 requests.api get
 malicious5 aiohttp.client ClientSession
 malicious7 socket create_connection
 malicious8 subprocess run
 malicious9 sys exit
 malicious13 pickle loads
 malicious14 runpy _run_code
 malicious15 bdb Bdb.run
 malicious16 pip main
 malicious17 torch._inductor.codecache compile_file
 malicious18 pydoc pipepager
 malicious20 venv create
 malicious21 timeit timeit
 malicious22 numpy.testing._private.utils runstring
"""
"""picklescan's (and modelscan's) files that are one call: file, module, name."""

_GETS = b"Vos\np2\n0Vsystem\np3\n0Vtorch\np0\n0VLongStorage\np1\n0g2\ng3\n\x93(Vcat flag.txt\ntR."


def of_picklescan() -> Iterator[tuple[str, str, bytes]]:
    for line in CALLS.split("\n")[1:-1]:
        file, module, qualified = line.split()
        yield file, "x.pkl", program(reduce(module, qualified, PAYLOAD))
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
