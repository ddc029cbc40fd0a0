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
from collections.abc import Collection, Iterable, Iterator
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
        project: folder of the packages.

    Raises:
        PlumblineError: `modules` names no module of the project.
    """
    files: set[Path] = set()
    seen: set[str] = set()
    pending = list(modules)
    for name in pending:
        if not _files(project, name):
            raise PlumblineError(f"no such module in {project}: {name}")
    while pending:
        name = pending.pop()
        if name in seen or any(name == cut or name.startswith(f"{cut}.") for cut in without):
            continue
        seen.add(name)
        sources = _files(project, name)
        files.update(sources)
        for source in sources:
            files.update(_data_beside(source))
            pending.extend(_names(source, project))
        if sources and "." in name:  # importing a module runs its packages first
            pending.append(name.rpartition(".")[0])
    return sorted(path.relative_to(project) for path in files)


def source_digest(
    modules: Iterable[str], *, without: Collection[str] = (), project: Path = PROJECT
) -> str:
    """Return the SHA-256 of names and bytes of the closure's files; arguments as in `closure`."""
    digest = hashlib.sha256()
    for path in closure(modules, without=without, project=project):
        content = hashlib.sha256((project / path).read_bytes()).hexdigest()
        digest.update(f"{path.as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _files(project: Path, name: str) -> list[Path]:
    """Return the files of a module; empty for a name that is no module of the project."""
    if name.partition(".")[0] not in PACKAGES or not all(map(str.isidentifier, name.split("."))):
        return []
    path = project.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return [candidate for candidate in candidates if candidate.is_file()]


def _data_beside(source: Path) -> Iterator[Path]:
    for path in source.parent.iterdir():
        if path.suffix not in (".py", ".pyc") and path.is_file() and path.name[0] != ".":
            yield path


def _names(source: Path, project: Path) -> Iterator[str]:
    names, whole_package = _names_in(source, source.read_bytes())
    yield from names
    if whole_package:
        package = ".".join(source.parent.relative_to(project).parts)
        yield from (f"{package}.{path.stem}" for path in source.parent.glob("*.py"))


@cache
def _names_in(source: Path, text: bytes) -> tuple[frozenset[str], bool]:
    """Return the names that a file imports or has in strings, and if it loads its whole package.

    Some names are functions or other text; the caller ignores what is no module.
    """
    names: set[str] = set()
    whole_package = False
    pending: list[ast.AST] = [ast.parse(text, str(source))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise PlumblineError(f"{source}:{node.lineno}: relative import; name the package")
            names.update(
                (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update((node.value, f"{node.value}.__main__"))  # `python -m` takes packages
        elif isinstance(node, ast.JoinedStr):
            whole_package |= ast.unparse(node).startswith("f'{__name__}.")
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(name for name in names if name.startswith(PACKAGES)), whole_package
