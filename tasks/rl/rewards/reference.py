"""`path.py:name`, the location of a user's reward function. The file is parsed, not run."""

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
        path: absolute path of the file.
        name: name of the function.
    """

    path: Path
    name: str

    @classmethod
    def of(cls, text: str) -> FunctionReference:
        """Parse `path.py:name`; a relative path starts at the working directory.

        Raises:
            ConfigError: not of that form.
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
        """Return the SHA-256 of the file. Files that it imports are not included."""
        return hashlib.sha256(self._read()).hexdigest()

    def require(self) -> None:
        """Check that the file exists and defines the name at its top level.

        Raises:
            ConfigError: no such file, not Python, or no such name.
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
    """Return the names bound at the file's top level; `*` if it has a star import."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # names inside it are local
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes.extend(ast.iter_child_nodes(node))
    return names
