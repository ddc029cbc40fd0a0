"""A source that was altered behind its size and its restored mtime is another source."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.delivery.plan.identity import folder_identity
from tasks.delivery.side_files import find_tokens
from tasks.rl.rewards.identity import model_digest


def alter(file: Path) -> None:
    """Change the last byte; size and mtime stay."""
    before = file.stat()
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    time.sleep(0.02)  # the kernel's clock for ctimes ticks every 10 ms or faster
    file.write_bytes(raw)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize(
    "identity", [folder_identity, model_digest, lambda folder: find_tokens([folder]).identity()]
)
def test_an_altered_file_changes_the_key(
    identity: Callable[[Path], object], tmp_path: Path
) -> None:
    for name in ("model.safetensors", "vocab.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    alter(tmp_path / "tokenizer_config.json")
    assert identity(tmp_path) != before
