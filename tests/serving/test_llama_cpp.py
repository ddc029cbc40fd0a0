"""llama.cpp's programs: where they are looked for, and the command that serves a GGUF file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tasks.serving.http_server import started
from tasks.serving.llama_cpp import Programs, find_programs, gguf_file, serve_command, serve_line


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


def test_the_line_that_serves_a_folder(tmp_path: Path) -> None:
    """A GGUF file gets the sampling defaults of its folder; safetensors are served by vLLM."""
    file = tmp_path / "model-q8_0.gguf"
    file.touch()
    assert gguf_file(tmp_path) == file
    assert "--temp 1.0 --top-p 1.0 --top-k 0 --min-p 0.0" in " ".join(serve_command(file))
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": [7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert serve_line(tmp_path) == (
        f"llama-server -m {file} --temp 0.6 --top-p 1.0 --top-k 20 --min-p 0.0 --repeat-penalty 1.0"
    )
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert gguf_file(folder) is None
    assert serve_line(folder) == f"vllm serve '{folder}'"


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
