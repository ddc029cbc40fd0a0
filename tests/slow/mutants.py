"""Plant seeded faults in the product, and count those that the tests of `make test` notice.

    python -m tests.slow.mutants                    # this commit
    python -m tests.slow.mutants --commit 5d15622   # product and tests of an older one, its faults

Each fault is planted in a copy of the commit, and the tests of its room run until one fails. They
have to pass without it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
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


def outcome(room: str, root: Path, limit_s: float) -> str:
    """Run the tests of a package: "noticed" if one fails, "hung" at the limit, else "MISSED"."""
    paths = [path for path in ROOMS[room] if (root / path).exists()]
    words = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
        "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *paths,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(root)}  # child processes, too
    try:
        done = subprocess.run(words, cwd=root, env=env, timeout=limit_s, stdout=subprocess.DEVNULL)
        return "noticed" if done.returncode else "MISSED"
    except subprocess.TimeoutExpired:
        return "hung"


def plant(mutant: Mutant, root: Path, limit_s: float) -> str:
    """Return the outcome of the tests with the fault."""
    path = root / mutant.file
    intact = path.read_bytes()
    path.write_bytes(intact[: mutant.start] + mutant.text.encode() + intact[mutant.stop :])
    try:
        return outcome(mutant.room, root, limit_s)
    finally:
        path.write_bytes(intact)


def main() -> None:
    """Print each fault with whether it was noticed, and the share."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--room", default="", help="only this package")
    parser.add_argument("--limit_s", type=float, default=1800)
    args = parser.parse_args()
    git = ["git", "-C", str(Path(__file__).parents[2]), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "plumbline"
        subprocess.run([*git, "add", "-q", "--detach", str(root), args.commit], check=True)
        try:
            drawn = [m for m in chosen(root, args.count, args.seed) if m.room.startswith(args.room)]
            for room in dict.fromkeys(mutant.room for mutant in drawn):
                if outcome(room, root, args.limit_s) != "MISSED":
                    sys.exit(f"{room}: its tests fail without a fault: {' '.join(ROOMS[room])}")
            outcomes = Counter[str]()
            for mutant in drawn:
                outcomes[word := plant(mutant, root, args.limit_s)] += 1
                print(f"{word:<7}  {mutant.file}:{mutant.line}  {mutant.text}", flush=True)
            print(f"{dict(outcomes)} by the tests of {args.commit}")
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


if __name__ == "__main__":
    main()
