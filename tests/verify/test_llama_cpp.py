"""Verify adapters on llama.cpp's own server, in an environment of its own.

PLUMBLINE_PEERS=~/peers tests/delivery/peers.sh llamacpp
PLUMBLINE_PEERS=~/peers .venv/bin/python -m pytest -m peers tests/verify/test_llama_cpp.py
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import environment
from tests.delivery.peers import peer_folder
from tests.verify import faults
from tests.verify.conftest import SPOILT, Answer

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1500)]
PROGRAM = Path(__file__).with_name("llama_cpp_program.py")
Verify = Callable[..., Answer]


@contextmanager
def llama_cpp(base: Path, adapters: Mapping[str, Path], out: Path, *options: str) -> Iterator[str]:
    """Start the server, yield its address, and end it."""
    python = peer_folder("llamacpp") / "bin" / "python"
    words = [str(python), str(PROGRAM), str(base), str(out), *options]
    out.mkdir()
    process = subprocess.Popen(
        [*words, *(f"{name}={folder}" for name, folder in adapters.items())],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=(out / "server.log").open("w"),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), (out / "server.log").read_text()[-4000:]
        yield url
    finally:
        process.kill()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def adapters(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a trained adapter, another one, and the first one's faulty versions."""
    spoilt = faults.adapters(models / SPOILT, models / "lora-0", tmp_path_factory.mktemp("faulty"))
    return {SPOILT: models / SPOILT, "lora-0": models / "lora-0", **spoilt}


def test_faults_are_named_and_a_clean_server_raises_no_alarm(
    models: Path, adapters: dict[str, Path], verify: Verify, tmp_path: Path
) -> None:
    with llama_cpp(models / "base", adapters, tmp_path / "llama", "--neutral") as url:
        words = (f"url={url}", f"source={models / SPOILT}")
        clean = verify(*words, f"name={SPOILT}")
        assert clean.code == 0, clean.out + clean.err
        # A response with parts of letters is not streamed whole.
        unproven = {name for name, verdict in clean.verdicts.items() if verdict != "ok"}
        assert unproven <= {"long-prompts", "streaming"}, clean.out
        for name, cause in (
            ("zeros", "base-served"),
            ("half", "adapter-scaled"),
            ("one-layer", "partly-other-weights"),
            ("step-before", "other-checkpoint"),
            ("lora-0", "adapters-swapped"),
        ):
            answer = verify(*words, f"name={name}")
            assert (answer.code, cause in answer.causes) == (1, True), answer.out


def test_its_own_defaults_and_its_prompt_cache_are_found(
    models: Path, adapters: dict[str, Path], verify: Verify, tmp_path: Path
) -> None:
    """The defaults are a temperature of 0.8, and a cache that mixes adapters (issue 26207)."""
    with llama_cpp(models / "base", adapters, tmp_path / "llama") as url:
        answer = verify(f"url={url}", f"source={models / SPOILT}", f"name={SPOILT}")
    assert answer.code == 1, answer.out + answer.err
    faulty = {name for name, verdict in answer.verdicts.items() if verdict == "fault"}
    assert faulty == {"sampling", "leak"}, answer.out
    assert "llama-server --no-cache-prompt" in answer.out
