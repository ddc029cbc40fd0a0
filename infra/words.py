"""Check the project's English and its front pages; `make check` runs it.

A docstring begins with a verb or a noun, a variable is named after its contents, Markdown prose
wraps at 100 characters, and every file that a package's front page names exists. Exits 1 with one
line per finding.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

DIALECT = re.compile(r"(What|Of|Whether|Who|Those|How|Which)\b")
VAGUE = {"found", "one", "said"}
WIDTH = 100
CODE = ("flows", "tasks", "infra", "benchmarks")
_ENTRY = re.compile(r"([a-z_0-9*]+/?(?:, [a-z_0-9*]+/?)*) {2,}\S|([a-z_0-9]+)\.py {2,}\S")
"""A line of a front page: file names without `.py`, then what they hold."""


def python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) for the docstrings and variables of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [item.target for body in bodies for item in body if isinstance(item, ast.AnnAssign)]
    for node in ast.walk(tree):
        if node in fields:  # a field of a dataclass is a key of an artifact's JSON: `Check.found`
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match = DIALECT.match(ast.get_docstring(node) or "")
            if match:
                yield getattr(node, "lineno", 1), f"a docstring begins with {match[1]!r}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, f"a variable is called {node.id!r}"
        elif isinstance(node, ast.arguments):  # a keyword says at the call what it is: found=
            for argument in (*node.posonlyargs, *node.args):
                if argument.arg in VAGUE:
                    yield argument.lineno, f"an argument is called {argument.arg!r}"


def front_page(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) for files that a package's docstring names and that do not exist."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _ENTRY.match(line):
            for name in (match[1] or match[2]).split(", "):
                name = name.rstrip("/")
                if not any([*path.parent.glob(f"{name}.py"), *path.parent.glob(name)]):
                    yield number, f"the front page names {name}, which does not exist"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) for lines of Markdown prose that are too long; tables may be."""
    code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if (
            len(line) > WIDTH
            and not code
            and not line.startswith(("|", "#"))
            and " " in line[:WIDTH]
        ):
            yield number, f"{len(line)} characters; prose wraps at {WIDTH}"


def findings(root: Path) -> Iterator[str]:
    """Yield one line per finding in code and pages outside the allow-list of pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as file:
        allowed = tuple(tomllib.load(file)["tool"]["plumbline"]["words"]["allow"])
    code = [path for folder in CODE for path in (root / folder).rglob("*.py")]
    for path in sorted([*code, *root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        name = path.relative_to(root).as_posix()
        if name.startswith(allowed):
            continue
        if path.suffix == ".md":
            checks = [prose]
        else:
            checks = [python, front_page] if path.name == "__init__.py" else [python]
        for check in checks:
            yield from (f"{name}:{line}: {finding}" for line, finding in check(path))


def main() -> int:
    """Print the findings; return the exit status."""
    lines = list(findings(Path(__file__).resolve().parents[1]))
    print("\n".join(lines) or "words: no finding")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
