"""Let nobody but the owner read what the program writes: databases, logs, artifacts, journals.

Every command calls `stay_private` first, and its child processes inherit the umask. What a user
asks for at a place of their own (`out=`, `out_dir=`) gets the permissions that any other program
would give it (`open_up`).
"""

from __future__ import annotations

import os
from pathlib import Path

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
