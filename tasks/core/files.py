"""Open and copy single files of a folder that somebody else made; the digest of our own.

A link may lead to a file of its own folder, or of the Hugging Face hub cache that the folder lies
in (`snapshots/<revision>/<name> -> ../../blobs/<hash>`). Any other link could publish a file that
its user never meant to share: a private key, `/proc/self/environ`.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shlex
import shutil
import stat
from functools import cache
from pathlib import Path
from typing import BinaryIO

from tasks.core.errors import ArtifactError

_STEP = 1 << 30
TASKS = Path(__file__).resolve().parents[1]


@cache
def source_digest() -> str:
    """Return the SHA-256 of all files of package `tasks`: the code part of every cache key.

    A changed comment runs stages again; which lines decide the numbers of a stage is not guessed.
    """
    digest = hashlib.sha256()
    for path in sorted(TASKS.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(TASKS).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def meant(path: Path) -> str:
    """Return the folder beside a path that has the most similar name; "" if none is similar."""
    with contextlib.suppress(OSError):
        there = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
        near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
        return str(path.parent / near[0]) if near else ""
    return ""


def link_problem(path: Path, root: Path) -> str:
    """Return the reason why a path of a folder must not be followed; "" if it may be."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a RuntimeError for links in a circle
        reason = error.strerror if isinstance(error, OSError) else "links in a circle"
        return f"a broken link: {reason}" if path.is_symlink() else f"cannot be read: {reason}"
    home = root.resolve()
    if real.is_relative_to(home) or real.parent == _hub_blobs(home):
        return ""
    target = path.readlink() if path.is_symlink() else real
    return f"a link to {target}, outside of the folder and its hub cache"


def _hub_blobs(home: Path) -> Path | None:
    """Return the folder of the files' contents if `home` lies in a repository of a hub cache."""
    for folder in (home, *home.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return folder.parent.parent / "blobs"
    return None


def link_refused(path: Path, problem: str) -> ArtifactError:
    """Return the error for a path with a `link_problem`."""
    return ArtifactError(
        f"{path}: {problem}",
        hint=f"if its content belongs there: cp -rL {shlex.quote(str(path.parent))} "
        "<a new folder>, and use that",
    )


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read bytes; never waits for the other end of a pipe.

    Raises ArtifactError for a folder, a pipe, a socket or a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ArtifactError(
            f"{path}: a folder, a pipe or a device, not a file",
            hint="replace it with a regular file, or remove it",
        )
    return os.fdopen(handle, "rb")


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes of a file; blocks are shared until one side changes, if the disk can do it.

    An existing `target` is replaced, never written through. The copy has the mode of the umask.
    """
    with open_regular(source) as old:
        target.unlink(missing_ok=True)
        with target.open("xb") as new:
            with contextlib.suppress(OSError):  # shares blocks on btrfs and XFS
                while os.copy_file_range(old.fileno(), new.fileno(), _STEP):
                    pass
            # Both files stand where the kernel stopped: here nothing is left, or all of it.
            shutil.copyfileobj(old, new, 1 << 20)
