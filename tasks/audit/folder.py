"""An untrusted folder: listed once, its documents and headers read on demand and within limits.

    folder = Folder(Path("ckpt"))
    folder.files["model.safetensors"]        size in bytes
    folder.json("config.json").get("model_type")
    folder.wrong["config.json"]              why the file is unusable, e.g. not JSON
    open_weights(folder, "model.safetensors").tensors["lm_head.weight"].shape

Nothing is written, and nothing is run in this process. Links to folders, and links that lead out of
the folder and its hub cache, are not followed; pipes and devices are not opened.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json, read_text
from tasks.weights.files.folder import entry_problem
from tasks.weights.files.reader import Weights, index_of, is_index, read_header
from tasks.weights.files.tensors import Tensor, Tensors
from tasks.weights.pickled.torch_file import nested_in, read_torch_file

MAX_ENTRIES = 50_000
"""Most files and folders that are listed."""
MAX_DEPTH = 6
MAX_TEXT_BYTES = 4 << 20
_T = TypeVar("_T")


class Folder:
    """An untrusted folder; a missing or unusable file reads as an empty document."""

    def __init__(self, root: Path) -> None:
        """List the folder. Raises ArtifactError if it does not exist or cannot be read."""
        self.root = root
        self.files: dict[str, int] = {}  # size in bytes of every regular file, by relative path
        self.folders: list[str] = []  # relative paths
        # reason by path: broken links, links to folders, folders nested too deep
        self.odd: dict[str, str] = {}
        # reason by path: links that lead out, pipes, sockets, devices, endless listings
        self.unsafe: dict[str, str] = {}
        self.wrong: dict[str, str] = {}  # reason by name; filled when files are read
        self._read: dict[str, Any] = {}
        self._list()

    def here(self) -> Iterator[str]:
        """Yield the names of files directly in the folder."""
        return (name for name in self.files if "/" not in name)

    def json(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object."""
        return self._once(name, read_json, {})

    def text(self, name: str) -> str:
        """Return the content of a text file."""
        return self._once(name, lambda path: read_text(path, MAX_TEXT_BYTES), "")

    def _once(self, name: str, read: Callable[[Path], _T], empty: _T) -> _T:
        if name not in self._read:
            self._read[name] = empty
            if name in self.files:
                try:
                    self._read[name] = read(self.root / name)
                except ArtifactError as error:
                    self.wrong[name] = error.message.removeprefix(f"{self.root / name}: ")
        result: _T = self._read[name]
        return result

    def _list(self) -> None:
        """List breadth first, within `MAX_ENTRIES` and `MAX_DEPTH`."""
        count, queue = 0, deque([""])
        while queue:
            at = queue.popleft()
            try:
                with os.scandir(self.root / at) as entries:
                    some = sorted(islice(entries, MAX_ENTRIES + 1), key=lambda entry: entry.name)
            except OSError as error:
                if not at:
                    text = f"{self.root}: cannot be read: {error.strerror}"
                    raise ArtifactError(text) from error
                self.odd[at.rstrip("/")] = f"cannot be read: {error.strerror}"
                continue
            for entry in some:
                count += 1
                if count > MAX_ENTRIES:
                    self.unsafe[""] = f"more than {MAX_ENTRIES} files; the rest not listed"
                    return
                if self._add(entry, f"{at}{entry.name}"):
                    queue.append(f"{at}{entry.name}/")

    def _add(self, entry: os.DirEntry[str], name: str) -> bool:
        """Add an entry. Returns True for a folder to list."""
        try:
            info = entry.stat()  # follows links to files, of which hub caches consist
        except OSError as error:
            self.odd[name] = f"a broken link: {error.strerror}"
            return False
        if entry.is_symlink() and (problem := entry_problem(self.root / name, self.root)):
            self.unsafe[name] = problem
        elif stat.S_ISREG(info.st_mode):
            self.files[name] = info.st_size
        elif not stat.S_ISDIR(info.st_mode):
            self.unsafe[name] = "a pipe, a socket or a device"
        elif entry.is_symlink():
            self.odd[name] = "a link to a folder, which is not followed"
        elif name.count("/") + 1 >= MAX_DEPTH:
            self.odd[name] = "nested too deep"
        else:
            self.folders.append(name)
            return True
        return False


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `checkpoint-500` before `checkpoint-1000`."""
    parts = re.split(r"(\d{1,12})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def open_weights(folder: Folder, single: str) -> Weights:
    """Open the files of a checkpoint: those of its index, else `single`, else its shards."""
    weights = Weights(single, index=_index(folder, index_of(single)))
    names = sorted(set(weights.index.values())) if weights.index else _unlisted(folder, single)

    def read(path: Path) -> Tensors:
        is_safe = path.suffix == ".safetensors"
        return read_header(path).tensors if is_safe else _pickle(path, weights)

    weights.open(folder.root, names, read, folder.files.__contains__)
    return weights


def _index(folder: Folder, name: str) -> Mapping[str, str] | None:
    table = folder.json(name).get("weight_map")
    if name not in folder.files or name in folder.wrong:
        return None
    if is_index(table):
        return table
    folder.wrong[name] = "its weight_map is not a table of file names"
    return None


def _unlisted(folder: Folder, single: str) -> list[str]:
    """Return the files of a checkpoint without an index: the single file, else its shards."""
    if single in folder.files:
        return [single]
    stem, _, suffix = single.rpartition(".")
    pattern = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}")
    return [name for name in folder.here() if pattern.fullmatch(name)]


def _pickle(path: Path, into: Weights) -> Tensors:
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: contains a {type(content).__name__}, not a state dict")
    if key := nested_in(content):
        raise ArtifactError(f"{path}: a trainer's checkpoint: save what is under the key {key!r}")
    into.others += [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
