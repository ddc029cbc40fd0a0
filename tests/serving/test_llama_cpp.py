"""llama.cpp's programs: where they are looked for, and the command that serves a GGUF file."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tasks.serving.http_server import started
from tasks.serving.llama_cpp import Programs, find_programs


@pytest.mark.parametrize("place", ["", "build/bin"])
def test_programs_are_found_where_a_build_or_an_archive_puts_them(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / place
    bin_folder.mkdir(parents=True, exist_ok=True)
    server, converter = bin_folder / "llama-server", tmp_path / "convert_hf_to_gguf.py"
    for path in (server, converter):
        path.touch(mode=0o755)
    assert find_programs(str(tmp_path)) == Programs(converter, None, server)
    monkeypatch.setenv("PATH", f"{tmp_path}:{bin_folder}")
    assert find_programs(None) == Programs(converter, None, server)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_programs(None) == Programs(None, None, None)


def test_the_sockets_of_a_killed_server_go_with_it() -> None:
    listens = (
        "import socket, tempfile, time; s = socket.socket(socket.AF_UNIX)\n"
        "s.bind(tempfile.gettempdir() + '/x'); print(s.getsockname(), flush=True); time.sleep(600)"
    )
    with started([sys.executable, "-c", listens]) as child:
        printed = child.read(time.monotonic() + 60)
        assert printed is not None
        file = Path(printed.decode().strip())
        assert file.is_socket()
        os.kill(child.pid, signal.SIGKILL)
    assert not file.parent.exists()
