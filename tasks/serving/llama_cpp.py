"""Find llama.cpp's programs, and serve a folder that holds a GGUF file with its own server.

    programs = find_programs("/opt/llama.cpp")        or None: those on PATH
    serve_command(Path("served/model-q8_0.gguf"))     llama-server -m ... --temp 1.0 ...

llama.cpp is installed by its users: no package holds its converter. Its server knows no
generation_config.json and has sampling defaults of its own, so the command spells out the folder's.
"""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CONVERTER = "convert_hf_to_gguf.py"
QUANTIZER = "llama-quantize"
SERVER = "llama-server"
_PLACES = ("", "bin", "build/bin")
"""Folders of the programs, in a folder of llama.cpp that was built or unpacked."""
_SAMPLING = {
    "temperature": ("--temp", 1.0),
    "top_p": ("--top-p", 1.0),
    "top_k": ("--top-k", 0),
    "min_p": ("--min-p", 0.0),
    "repetition_penalty": ("--repeat-penalty", 1.0),
}
"""Option of llama-server for each field of generation_config.json, and what its absence means."""


@dataclass(frozen=True)
class Programs:
    """Programs of llama.cpp; None for each that was not found."""

    converter: Path | None  # script that writes a GGUF file in 16 or 8 bits
    quantizer: Path | None  # program that makes the other types from one in 16 bits
    server: Path | None  # program that serves a GGUF file


def find_programs(folder: str | None) -> Programs:
    """Find the programs in a folder of llama.cpp; without one, on PATH."""
    return Programs(*(_find(name, folder) for name in (CONVERTER, QUANTIZER, SERVER)))


def _find(name: str, folder: str | None) -> Path | None:
    if folder is None:
        program = shutil.which(name)
        return Path(program) if program else None
    files = (Path(folder).expanduser() / place / name for place in _PLACES)
    return next((path for path in files if path.is_file()), None)


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file of a served folder; None for a folder with other weights."""
    if any(folder.glob("[!.]*.safetensors")):
        return None
    files = sorted(folder.glob("[!.]*.gguf"))
    return files[0] if len(files) == 1 else None


def serve_command(file: Path, server: Path | None = None) -> list[str]:
    """Return the command that serves a GGUF file with the sampling defaults of its folder."""
    defaults: dict[str, float] = {}
    with suppress(OSError, ValueError):
        defaults = json.loads((file.parent / "generation_config.json").read_text())
    command = [str(server or SERVER), "-m", str(file)]
    for name, (option, neutral) in _SAMPLING.items():
        value = defaults.get(name)
        command += [option, str(neutral if value is None else value)]
    return command


def serve_line(folder: Path) -> str:
    """Return what to type to serve a folder, by llama.cpp or by vLLM."""
    file = gguf_file(folder)
    return shlex.join(["vllm", "serve", str(folder)] if file is None else serve_command(file))
