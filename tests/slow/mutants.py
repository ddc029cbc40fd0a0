"""Plant seeded faults in the product, and count those that the tests of `make test` notice.

    python -m tests.slow.mutants                   # the tests of this commit
    python -m tests.slow.mutants --tests 5d15622   # those of an older one, on the same faults

Each fault is planted in a copy of the repository, and the tests of its room run until one fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = {
    "tasks/drift": ("tests/drift", "tests/delivery", "tests/e2e"),
    "tasks/weights": ("tests/weights", "tests/delivery"),
    "tasks/verify": ("tests/verify", "tests/e2e/test_first_screen.py"),
    "tasks/training/tokens": ("tests/training/tokens", "tests/training"),
    "tasks/rl": ("tests/rl", "tests/training/test_online.py"),
}
"""Tests that can notice a fault in a package, the quickest first."""
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A replaced part of a file."""

    room: str
    file: str
    line: int
    start: int  # bytes
    stop: int
    text: str

    def source(self, root: Path) -> tuple[bytes, bytes]:
        """Return the file without and with the fault."""
        whole = (root / self.file).read_bytes()
        return whole, whole[: self.start] + self.text.encode() + whole[self.stop :]


def mutated(node: ast.AST) -> str:
    """Return a faulty form of a node; "" if there is none."""
    if isinstance(node, ast.Raise):
        return "pass"
    if isinstance(node, ast.If | ast.IfExp):
        return ""  # its test is a node of its own
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        other = ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        other = type(node)(**{**dict(ast.iter_fields(node)), "op": SWAPPED[type(node.op)]()})  # type: ignore[assignment]
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        return str(not node.value)
    else:
        return ""
    return f"({ast.unparse(other)})"


def mutants(root: Path, room: str) -> Iterator[Mutant]:
    """Yield every fault of a package that can be planted."""
    for path in sorted((root / room).rglob("*.py")):
        source = path.read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(ast.parse(source)):
            if text := mutated(node):
                start = starts[node.lineno - 1] + node.col_offset
                stop = starts[node.end_lineno - 1] + node.end_col_offset
                yield Mutant(room, str(path.relative_to(root)), node.lineno, start, stop, text)


def chosen(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return as many mutants of each room; the same ones for the same seed and product."""
    share = count // len(ROOMS)
    draw = random.Random(seed)
    return [mutant for room in ROOMS for mutant in draw.sample(list(mutants(root, room)), share)]


def is_noticed(mutant: Mutant, root: Path, limit_s: float) -> bool:
    """Return True if a test of the room fails, or hangs, with the fault."""
    intact, faulty = mutant.source(root)
    (root / mutant.file).write_bytes(faulty)
    paths = [path for path in ROOMS[mutant.room] if (root / path).exists()]
    words = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider",
        "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *paths,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(root)}  # child processes, too
    try:
        done = subprocess.run(
            words, cwd=root, env=env, timeout=limit_s, capture_output=True, check=False
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        (root / mutant.file).write_bytes(intact)


def main() -> None:
    """Print each fault with whether it was noticed, and the share."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", default="HEAD", help="commit whose tests are run")
    parser.add_argument("--room", default="", help="only this package")
    parser.add_argument("--limit_s", type=float, default=1800)
    args = parser.parse_args()
    project = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "plumbline"
        git = ["git", "-C", str(project)]
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(root), "HEAD"], check=True)
        try:
            inside = ["git", "-C", str(root)]
            subprocess.run([*inside, "rm", "-rq", "tests"], check=True)
            subprocess.run([*inside, "checkout", "-q", args.tests, "--", "tests"], check=True)
            noticed = []
            for mutant in chosen(project, args.count, args.seed):
                if mutant.room.startswith(args.room):
                    noticed.append(is_noticed(mutant, root, args.limit_s))
                    word = "noticed" if noticed[-1] else "MISSED "
                    print(f"{word}  {mutant.file}:{mutant.line}  {mutant.text}", flush=True)
            print(f"{sum(noticed)} of {len(noticed)} noticed by the tests of {args.tests}")
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(root)], check=True)


if __name__ == "__main__":
    main()
