"""`path.py:name`, which says where a user's function is. Read without running the file."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ConfigError

EXAMPLE = "reward.function=<path.py>:<name of a function in it>, or exact_match"


@dataclass(frozen=True)
class FunctionReference:
    """A function in a file.

    Attributes:
        path: the file, absolute.
        name: the function's.
    """

    path: Path
    name: str

    @classmethod
    def of(cls, text: str) -> FunctionReference:
        """From `path.py:name`; a relative path is one of the working directory.

        Raises:
            ConfigError: it is not of that form.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            raise ConfigError(
                f"reward.function={text} is not of the form path.py:name", hint=EXAMPLE
            )
        return cls(Path(path).expanduser().absolute(), name)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def digest(self) -> str:
        """SHA-256 of the file: another text is another reward. What it imports is not in it."""
        return hashlib.sha256(self._read()).hexdigest()

    def require(self) -> None:
        """Look whether the file is there and has the name at its top level.

        Raises:
            ConfigError: it is not there, is no Python, or does not have the name.
        """
        text = self._read()
        try:
            tree = ast.parse(text, str(self.path))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"reward.function={self}: the file is not Python: {error}", hint=EXAMPLE
            ) from error
        names = _names(tree)
        if self.name not in names and "*" not in names:
            there = ", ".join(sorted(names)) or "nothing"
            raise ConfigError(
                f"reward.function={self}: no {self.name!r} in the file, which has {there}",
                hint=EXAMPLE,
            )

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"reward.function={self}: {error.strerror or error}: {self.path}", hint=EXAMPLE
            ) from error


def _names(tree: ast.Module) -> set[str]:
    """What the file binds outside of functions and classes; `*` where it imports all of another."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue  # what is defined inside is not the file's
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).split(".")[0] for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return found
