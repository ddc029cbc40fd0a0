"""Merge into a real file system of a few MB that another process fills; run under `unshare -rm`.

    python small_disk.py INPUTS DISK

INPUTS holds `base` and `adapter`, DISK is an empty folder; the results are printed as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin, publish, staging
from tasks.weights.execute import running
from tasks.weights.execute.execute import Executed, execute
from tasks.weights.execute.journal import JOURNAL, read_outcomes
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.plan.adapter_ops import LowRank
from tasks.weights.plan.operations import Op, Plan

MB = 1 << 20
NAMES = [f"layer.{index:02d}" for index in range(64)]
SHAPE, RANK = (32, 256), 4


def merge_into(inputs: Path, final: Path, before_publishing: Callable[[], None]) -> Executed:
    """Merge a LoRA into every tensor of `base`, and publish."""
    ops = tuple(
        Op(
            name, SHAPE, "BF16", f"base:{name}", "BF16",
            terms=(LowRank(f"adapter:{name}.A", f"adapter:{name}.B", 2.0),),
        )
        for name in NAMES
    )  # fmt: skip
    refs = {name: SourceRef(inputs / name) for name in ("base", "adapter")}
    sources = open_sources(refs)
    with staging(final) as work:
        done = execute(Plan(ops), sources, work, workers=1)
        before_publishing()
        publish(work, final, Origin("weights", "test", final.name))
    return done


def fill(disk: Path, *, spare: int = 0) -> None:
    """Use all free space except `spare` bytes, as another user of the disk would."""
    with (disk / "neighbour").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(file.tell() - spare)


@contextlib.contextmanager
def filled_once_files_are_there(disk: Path) -> Iterator[None]:
    """Fill the disk once the files' space is allocated and nothing is written yet."""
    real = running.prepare_file

    def prepared(*arguments: Any) -> tuple[int, bool]:
        prepared_file = real(*arguments)
        fill(disk)
        return prepared_file

    running.prepare_file = prepared
    try:
        yield
    finally:
        running.prepare_file = real


def refused(inputs: Path, disk: Path, before_publishing: Callable[[], None]) -> dict[str, Any]:
    """Run a merge that cannot succeed, return its error and what it left; then free the disk."""
    final = disk / "store" / "model"
    try:
        merge_into(inputs, final, before_publishing)
    except ArtifactError as error:
        reported = [error.message, error.hint]
    else:
        reported = ["nothing was wrong", ""]
    left = sorted(path.name for path in final.parent.iterdir())
    entries = read_outcomes(final.parent / ".model.tmp" / JOURNAL)
    (disk / "neighbour").unlink()
    return {"error": reported, "left": left, "entries": len(entries)}


def main(inputs: Path, disk: Path) -> None:
    """Fill the disk before a run, midway and at its end; each time the next run continues."""
    size = f"size={3 * MB}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
    fill(disk, spare=MB // 2)
    results = {"before": refused(inputs, disk, lambda: None)}
    with filled_once_files_are_there(disk):
        results["midst"] = refused(inputs, disk, lambda: None)
    results["end"] = refused(inputs, disk, lambda: fill(disk))
    final = disk / "store" / "model"
    done = merge_into(inputs, final, lambda: None)
    results["last"] = {
        "resumed": done.resumed,
        "left": sorted(path.name for path in final.parent.iterdir()),
        "sha256": hashlib.sha256((final / "model.safetensors").read_bytes()).hexdigest(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
