"""`path.py:name`, the location of a function or class of the user. The file is parsed, not run."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ConfigError

REWARD, EVAL, ENVIRONMENT = "reward.function", "eval.function", "rl.environment"


@dataclass(frozen=True)
class FunctionReference:
    """A function in a file, or a class.

    Attributes:
        path: absolute path of the file.
        name: name of the function or class.
        setting: setting that names it.
    """

    path: Path
    name: str
    setting: str = REWARD

    @classmethod
    def of(cls, text: str, setting: str = REWARD) -> FunctionReference:
        """Parse `path.py:name`; a relative path starts at the working directory.

        Raises:
            ConfigError: not of that form.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            hint = cls(Path(), "", setting)._example
            raise ConfigError(f"{setting}={text} is not of the form path.py:name", hint=hint)
        return cls(Path(path).expanduser().absolute(), name, setting)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def _example(self) -> str:
        kind = "class" if self.setting == ENVIRONMENT else "function"
        example = f"{self.setting}=<path.py>:<name of a {kind} in it>"
        return f"{example}, or exact_match" if self.setting == REWARD else example

    def digest(self) -> str:
        """Return the SHA-256 of the file. Files that it imports are not included."""
        return hashlib.sha256(self._read()).hexdigest()

    def require(self) -> None:
        """Check that the file exists and defines the name at its top level.

        Raises:
            ConfigError: no such file, not Python, or no such name.
        """
        names = _names(self._tree())
        if self.name not in names and "*" not in names:
            there = ", ".join(sorted(names)) or "nothing"
            raise ConfigError(
                f"{self.setting}={self}: no {self.name!r} in the file, which has {there}",
                hint=self._example,
            )

    def require_methods(self, methods: Sequence[str]) -> None:
        """Check `require`, and that a class that is written in the file has these methods.

        A class with a base class may inherit them; it is checked when it is loaded.

        Raises:
            ConfigError: as `require`; or names the missing methods.
        """
        self.require()
        for node in self._tree().body:
            if isinstance(node, ast.ClassDef) and node.name == self.name and not node.bases:
                missing = [name for name in methods if name not in _names(node)]
                if missing:
                    raise ConfigError(
                        f"{self.setting}={self}: class {self.name} has no method "
                        f"{' and no method '.join(missing)}",
                        hint=" and ".join(f"def {name}(self, ...)" for name in missing),
                    )
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == self.name:
                raise ConfigError(
                    f"{self.setting}={self}: {self.name} is a function, not a class",
                    hint=self._example,
                )

    def _tree(self) -> ast.Module:
        text = self._read()
        try:
            return ast.parse(text, str(self.path))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"{self.setting}={self}: the file is not Python: {error}",
                hint=self._example,
            ) from error

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self.setting}={self}: {error.strerror or error}: {self.path}",
                hint=self._example,
            ) from error


def _names(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names bound at the top level of a file or class; `*` if it has a star import."""
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
