"""An untrusted folder: listed once, its files read on demand and within limits.

    folder = Folder(Path("ckpt"))
    folder.files["model.safetensors"]        size in bytes
    folder.json("config.json").get("model_type")
    folder.wrong["config.json"]              why the file is unusable, e.g. not JSON

Nothing is written, and nothing is run in this process. Links to folders, and links that lead out of
the folder and its hub cache, are not followed; pipes and devices are not opened. Every read is
limited in advance: by bytes, and for JSON by the number of values.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import DuplicateKeyError, parse_json
from tasks.weights.files.side_files import entry_problem

MAX_ENTRIES = 50_000
"""Most files and folders that are listed."""
MAX_DEPTH = 6
MAX_JSON_BYTES = 64 << 20
"""The largest published tokenizer.json has about 40 MB."""
MAX_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Listing:
    """The content of a folder, by path relative to it.

    Attributes:
        files: size in bytes of every regular file.
        folders: its subfolders.
        odd: broken links, links to folders, folders nested too deep; with the reason.
        unsafe: links that lead out, pipes, sockets, devices, endless listings; with the reason.
    """

    files: Mapping[str, int]
    folders: tuple[str, ...]
    odd: Mapping[str, str]
    unsafe: Mapping[str, str]


@dataclass
class Folder:
    """An untrusted folder; see the module. A missing file reads as an empty document.

    Attributes:
        root: path of the folder.
        wrong: reason by name for each file that exists and is unusable; filled when files are read.
        twice: duplicate key by name of the file; loaders keep its last value.
    """

    root: Path
    wrong: dict[str, str] = field(default_factory=dict)
    twice: dict[str, str] = field(default_factory=dict)
    _documents: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _texts: dict[str, str] = field(default_factory=dict, repr=False)
    _listing: Listing | None = field(default=None, repr=False)

    @property
    def listing(self) -> Listing:
        """The content of the folder. Raises ArtifactError if it cannot be listed."""
        if self._listing is None:
            self._listing = list_folder(self.root)
        return self._listing

    @property
    def files(self) -> Mapping[str, int]:
        """Size in bytes of every regular file, by path relative to the folder."""
        return self.listing.files

    def here(self) -> Iterator[str]:
        """Yield the names of files directly in the folder."""
        return (name for name in self.files if "/" not in name)

    def json(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object; empty if the file is missing or unusable (see `wrong`)."""
        if name not in self._documents:
            self._documents[name] = self._object(name)
        return self._documents[name]

    def text(self, name: str) -> str:
        """Return the content of a text file; "" if it is missing or unusable (see `wrong`)."""
        if name not in self._texts:
            raw = self._raw(name, MAX_TEXT_BYTES)
            try:
                self._texts[name] = raw.decode()
            except UnicodeDecodeError as error:
                self._texts[name], self.wrong[name] = "", f"not UTF-8: {error.reason}"
        return self._texts[name]

    def _object(self, name: str) -> Mapping[str, Any]:
        raw = self._raw(name, MAX_JSON_BYTES)
        if name not in self.files or name in self.wrong:
            return {}
        try:
            try:
                document = parse_json(raw, unique=True)
            except DuplicateKeyError as error:
                self.twice[name] = str(error)
                document = parse_json(raw)
        except ValueError as error:
            self.wrong[name] = f"not JSON: {error}"
            return {}
        if not isinstance(document, dict):
            self.wrong[name] = f"a JSON {type(document).__name__}, not an object"
            return {}
        return document

    def _raw(self, name: str, limit: int) -> bytes:
        size = self.files.get(name)
        if size is None:
            return b""
        if size > limit:
            self.wrong[name] = f"{size} bytes, at most {limit} are read"
            return b""
        try:
            with (self.root / name).open("rb") as file:
                return file.read(limit)
        except OSError as error:
            self.wrong[name] = f"cannot be read: {error.strerror or error}"
            return b""


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `checkpoint-500` before `checkpoint-1000`."""
    parts = re.split(r"(\d{1,12})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def list_folder(root: Path) -> Listing:
    """List a folder breadth first, within `MAX_ENTRIES` and `MAX_DEPTH`.

    Raises:
        ArtifactError: the folder does not exist, is not a folder, or cannot be read.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    odd: dict[str, str] = {}
    unsafe: dict[str, str] = {}
    seen, queue = 0, deque([""])
    while queue and seen <= MAX_ENTRIES:
        at = queue.popleft()
        try:
            with os.scandir(root / at) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MAX_ENTRIES:
                        unsafe[""] = f"more than {MAX_ENTRIES} files; the rest is not listed"
                        break
                    name = f"{at}{entry.name}"
                    kind, size = _kind(entry)
                    if entry.is_symlink() and (problem := _leads_out(root, name)):
                        unsafe[name] = problem
                    elif kind == "file":
                        files[name] = size
                    elif kind == "special":
                        unsafe[name] = "a pipe, a socket or a device"
                    elif kind == "folder" and name.count("/") + 1 < MAX_DEPTH:
                        folders.append(name)
                        queue.append(f"{name}/")
                    else:
                        odd[name] = "nested too deep" if kind == "folder" else kind
        except OSError as error:
            if not at:
                raise ArtifactError(f"{root}: cannot be read: {error.strerror}") from error
            odd[at.rstrip("/")] = f"cannot be read: {error.strerror}"
    return Listing(dict(sorted(files.items())), tuple(sorted(folders)), odd, unsafe)


def _leads_out(root: Path, name: str) -> str:
    """Return the reason why a link must not be followed; "" if it may be, or is broken."""
    return entry_problem(root / name, root) if (root / name).exists() else ""


def _kind(entry: os.DirEntry[str]) -> tuple[str, int]:
    """Return "file", "folder" or "special", else a description; and the size of a file."""
    try:
        info = entry.stat()  # follows links to files, of which hub caches consist
    except OSError as error:
        return f"a broken link: {error.strerror}", 0
    if stat.S_ISREG(info.st_mode):
        return "file", info.st_size
    if not stat.S_ISDIR(info.st_mode):
        return "special", 0
    return ("a link to a folder, which is not followed", 0) if entry.is_symlink() else ("folder", 0)
