"""Open and copy files of a folder that somebody else made; digest and modes of our own files.

A link may lead to a file of its own folder, or of the Hugging Face hub cache that the folder lies
in (`snapshots/<revision>/<name> -> ../../blobs/<hash>`). Any other link could publish a file that
its user never meant to share: a private key, `/proc/self/environ`.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `checkpoint-500` before `checkpoint-1000`."""
    parts = re.split(r"(\d{1,12})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


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


UMASK = "PLUMBLINE_UMASK"
"""Variable with the umask of the user, octal, for child processes and the worker of `make up`."""
_PRIVATE = 0o077


def stay_private() -> None:
    """Let new files and folders of this process and its children be readable by the owner only."""
    users = os.umask(_PRIVATE)
    os.environ.setdefault(UMASK, f"{users:03o}")


def open_up(root: Path) -> None:
    """Give a file, or a folder with all of its files, the permissions of the user's umask.

    No file of it may be a hard link of a file elsewhere.
    """
    try:
        umask = int(os.environ[UMASK], 8)
    except (KeyError, ValueError):  # `stay_private` was not called: the umask is the user's own
        return
    for path in (root, *(root.rglob("*") if root.is_dir() else ())):
        if not path.is_symlink():
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


SPACE_HINT = "free some space, or put the runs elsewhere: paths.runs=/big/disk/runs"
_SIZE_HINT = "ulimit -f unlimited; or another file system: paths.runs=/big/disk/runs"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def flush(path: Path) -> None:
    """Write a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_stats(path: Path) -> list[int]:
    """Return size, mtime, ctime and inode of a file: if all are the same, its bytes are, too.

    A process that alters a file can restore its mtime, but not its ctime.
    """
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def flush_tree(root: Path) -> None:
    """Write all files and folders below a folder to disk, and the folder itself."""
    for path in (root, *root.rglob("*")):
        flush(path)


def write_refused(path: Path, error: OSError) -> ArtifactError:
    """Return the ArtifactError for a write that the operating system refused."""
    message = f"{path}: cannot write: {error.strerror or error}"
    if is_full(error):
        message += f"; {free_bytes(path) / 1e9:.2f} GB are free there"
    return ArtifactError(message, hint=_SIZE_HINT if error.errno == errno.EFBIG else SPACE_HINT)


def is_full(error: BaseException | None) -> bool:
    """Return True for the error of a full disk, a used-up quota or a limit on file sizes."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def has_no_space(path: Path) -> bool:
    """Return True if the disk of a path, which may not exist yet, has less than a MB free."""
    return free_bytes(path) < 1e6


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a path, which may not exist yet."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def full_disk(error: Exception, runs: Path) -> ArtifactError | None:
    """Return the error of a full disk; None if the disk of `runs` is not full.

    The databases of Prefect and MLflow hide a full disk behind errors of their own.
    """
    if not is_full(error) and not has_no_space(runs):
        return None
    place = Path(getattr(error, "filename", None) or runs)
    return write_refused(place, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


@contextmanager
def disk_full_named(folder: Path) -> Iterator[None]:
    """Turn the OSError of a full disk into an ArtifactError that names the file, or the folder."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise write_refused(Path(error.filename or folder), error) from error
        raise
