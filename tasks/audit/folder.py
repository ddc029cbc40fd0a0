"""A folder that somebody else filled: listed once, its documents read when they are asked for.

    folder = Folder(Path("ckpt"))
    folder.files["model.safetensors"]        size in bytes
    folder.json("config.json").get("model_type")
    folder.wrong["config.json"]              why that gave nothing, where it is no JSON

Nothing is written and nothing is run. The folder is taken to be hostile: links to folders are not
followed, pipes and devices are not opened, and what is read is bounded before it is read: by bytes,
and for JSON by the number of values in it, since `[[],[],...]` takes twenty times its bytes.
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
from tasks.weights.files.documents import parse_json

MAX_ENTRIES = 50_000
"""Files and folders that are listed."""
MAX_DEPTH = 6
MAX_JSON_BYTES = 64 << 20
"""The largest tokenizer.json has some 40 MB."""
MAX_VALUES = 4_000_000
"""Values in one document: the largest tokenizer.json has some 2 million."""
MAX_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Listing:
    """What lies in a folder.

    Attributes:
        files: size in bytes of every regular file, by path relative to the folder.
        folders: paths of its folders, likewise.
        odd: path and reason of what is neither: broken links, pipes, links to folders.
        cut: why the list is not complete; "" where it is.
    """

    files: Mapping[str, int]
    folders: tuple[str, ...]
    odd: Mapping[str, str]
    cut: str


@dataclass
class Folder:
    """See the module. A file that is not there is as good as an empty document.

    Attributes:
        root: where it lies.
        wrong: by name, why a document that is there cannot be used; filled as they are read.
    """

    root: Path
    wrong: dict[str, str] = field(default_factory=dict)
    _documents: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _texts: dict[str, str] = field(default_factory=dict, repr=False)
    _listing: Listing | None = field(default=None, repr=False)

    @property
    def listing(self) -> Listing:
        """What lies in it. Raises ArtifactError where it cannot be listed."""
        if self._listing is None:
            self._listing = list_folder(self.root)
        return self._listing

    @property
    def files(self) -> Mapping[str, int]:
        """Size of every regular file, by path relative to the folder."""
        return self.listing.files

    def here(self) -> Iterator[str]:
        """Names of the files right in the folder."""
        return (name for name in self.files if "/" not in name)

    def sub(self, path: str) -> Folder:
        """One of its folders, as a folder."""
        return Folder(self.root / path)

    def json(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty where there is no such file, or no usable one (see `wrong`)."""
        if name not in self._documents:
            self._documents[name] = self._object(name)
        return self._documents[name]

    def text(self, name: str) -> str:
        """A text file; "" where there is none, or no usable one (see `wrong`)."""
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
            document = bounded_json(raw)
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
    """A key that sorts `checkpoint-500` before `checkpoint-1000`."""
    parts = re.split(r"(\d{1,12})", name)
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in parts]


def bounded_json(raw: bytes, *, unique: bool = False) -> Any:
    """What UTF-8 text says, where it holds at most `MAX_VALUES` values.

    Raises:
        ValueError: no JSON, too many values, nested too deep, or, where `unique`, a key twice.
    """
    count = sum(map(raw.count, (b",", b"[", b"{")))
    if count > MAX_VALUES:
        raise ValueError(f"some {count} values, at most {MAX_VALUES} are read")
    return parse_json(raw, unique=unique)


def list_folder(root: Path) -> Listing:
    """List a folder, breadth first and within bounds.

    Raises:
        ArtifactError: it is not there, is no folder, or cannot be read.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    odd: dict[str, str] = {}
    cut = ""
    seen, queue = 0, deque([""])
    while queue and not cut:
        at = queue.popleft()
        try:
            with os.scandir(root / at) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MAX_ENTRIES:
                        cut = f"more than {MAX_ENTRIES} files; the rest is not looked at"
                        break
                    name = f"{at}{entry.name}"
                    kind, size = _kind(entry)
                    if kind == "file":
                        files[name] = size
                    elif kind == "folder" and name.count("/") + 1 < MAX_DEPTH:
                        folders.append(name)
                        queue.append(f"{name}/")
                    else:
                        odd[name] = "nested too deep" if kind == "folder" else kind
        except OSError as error:
            if not at:
                raise ArtifactError(f"{root}: cannot be read: {error.strerror}") from error
            odd[at.rstrip("/")] = f"cannot be read: {error.strerror}"
    return Listing(dict(sorted(files.items())), tuple(sorted(folders)), odd, cut)


def _kind(entry: os.DirEntry[str]) -> tuple[str, int]:
    """ "file" or "folder", else what is odd about it; and the size of a file."""
    try:
        found = entry.stat()  # of what a link points to: hubs' caches are made of links to files
    except OSError as error:
        return f"a link that leads nowhere: {error.strerror}", 0
    if stat.S_ISREG(found.st_mode):
        return "file", found.st_size
    if not stat.S_ISDIR(found.st_mode):
        return "neither a file nor a folder: a pipe, a socket or a device", 0
    return ("a link to a folder, which is not followed", 0) if entry.is_symlink() else ("folder", 0)
