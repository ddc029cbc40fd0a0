"""Find the source files that a module's result depends on, by following its imports.

Their digest is part of the cache key of every stage and of tokenised data. All imports count, also
those inside functions. Names of our modules in strings count, because child processes are started
by module name; f"{__name__}.{x}" stands for every module of the package. Files that are not Python
(C sources, JSON tables) count with every module of their folder. Imports under TYPE_CHECKING do not
run and do not count.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tasks.core.errors import PlumblineError

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks")


def closure(
    modules: Iterable[str], *, without: Collection[str] = (), project: Path = PROJECT
) -> list[Path]:
    """Return every source file that the modules can run, relative to the project, sorted.

    Args:
        modules: dotted names to start from, e.g. `tasks.merge`.
        without: packages that the code names but this run never starts; they do not count.

    Raises:
        PlumblineError: `modules` names no module of the project.
    """
    tree = _Tree(project)
    files: set[Path] = set()
    seen: set[str] = set()
    pending = list(modules)
    for name in pending:
        if not tree.files(name):
            raise PlumblineError(f"no such module in {project}: {name}")
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        sources = tree.files(name)
        if not sources or any(name == cut or name.startswith(f"{cut}.") for cut in without):
            continue
        files.update(sources, tree.data_beside(name))
        pending.extend(tree.names(name))
        if "." in name:  # importing a module runs its packages first
            pending.append(name.rpartition(".")[0])
    return sorted(path.relative_to(project) for path in files)


def source_digest(
    modules: Iterable[str], *, without: Collection[str] = (), project: Path = PROJECT
) -> str:
    """Return the SHA-256 of names and bytes of the closure's files; arguments as in `closure`."""
    digest = hashlib.sha256()
    for path in closure(modules, without=without, project=project):
        content = _source(project / path).digest
        digest.update(f"{path.as_posix()} {content}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Package:
    """One folder: its Python modules and folders by name, and other files (C sources, tables)."""

    modules: Mapping[str, Path]
    folders: Mapping[str, Path]
    data: tuple[Path, ...]


_NONE = _Package({}, {}, ())


class _Tree:
    """The project's packages, each listed once: a closure looks up thousands of names."""

    def __init__(self, project: Path) -> None:
        self._packages = {"": _Package({}, {name: project / name for name in PACKAGES}, ())}

    def package(self, name: str) -> _Package:
        """Return the files of a package by its dotted name; none if there is no such package."""
        if name not in self._packages:
            parent, _, last = name.rpartition(".")
            folder = self.package(parent).folders.get(last)
            self._packages[name] = _listed(folder) if folder and folder.is_dir() else _NONE
        return self._packages[name]

    def files(self, name: str) -> list[Path]:
        """Return the files of a module; empty for a name that is no module of the project."""
        parent, _, last = name.rpartition(".")
        candidates = (
            self.package(parent).modules.get(last),
            self.package(name).modules.get("__init__"),
        )
        return [candidate for candidate in candidates if candidate is not None]

    def data_beside(self, name: str) -> tuple[Path, ...]:
        """Return the files that are not Python in the folders of a module's files."""
        return self.package(name.rpartition(".")[0]).data + self.package(name).data

    def names(self, name: str) -> Iterator[str]:
        """Yield the names that a module may load; some are no modules."""
        for path in self.files(name):
            source = _source(path)
            yield from source.names
            if source.whole_package:
                package = name if path.stem == "__init__" else name.rpartition(".")[0]
                yield from (f"{package}.{stem}" for stem in self.package(package).modules)


def _listed(folder: Path) -> _Package:
    modules, folders, data = {}, {}, []
    for entry in os.scandir(folder):
        stem, suffix = os.path.splitext(entry.name)
        if entry.is_dir():
            folders[entry.name] = Path(entry.path)
        elif suffix == ".py":
            modules[stem] = Path(entry.path)
        elif suffix != ".pyc" and entry.is_file() and stem[0] != ".":
            data.append(Path(entry.path))
    return _Package(modules, folders, tuple(data))


@dataclass(frozen=True)
class _Source:
    """One file: SHA-256 of its bytes, the names in it, and if it loads its whole package."""

    digest: str
    names: frozenset[str] = frozenset()
    whole_package: bool = False


def _source(path: Path) -> _Source:
    stat = path.stat()
    return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


@cache
def _read(path: Path, stat: tuple[int, ...]) -> _Source:
    """Read a file; `stat` is in the cache's key, so that a changed file is read again."""
    text = path.read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    return _Source(digest, *_names_in(path, text)) if path.suffix == ".py" else _Source(digest)


def _names_in(source: Path, text: bytes) -> tuple[frozenset[str], bool]:
    """Return the names that a file imports or has in strings, and if it loads its whole package.

    Some names are functions or other text; the caller ignores what is no module.
    """
    names: set[str] = set()
    whole_package = False
    pending: list[ast.AST] = [ast.parse(text, str(source))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            names.update((module, *(f"{module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update((node.value, f"{node.value}.__main__"))  # `python -m` takes packages
        elif isinstance(node, ast.JoinedStr):
            whole_package |= _is_in_this_package(node)
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(name for name in names if name.startswith(PACKAGES)), whole_package


def _absolute(source: Path, node: ast.ImportFrom) -> str:
    """Return the dotted name that a file imports from, also if the import is relative."""
    names = [node.module] if node.module else []
    folder = source.parents[max(node.level - 1, 0)]
    while node.level and (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names)


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _is_in_this_package(text: ast.JoinedStr) -> bool:
    """Return True for f"{__name__}.{x}"."""
    match text.values:
        case [ast.FormattedValue(value=ast.Name(id="__name__")), ast.Constant(value=str(rest)), *_]:
            return rest.startswith(".")
    return False
