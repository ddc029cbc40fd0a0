"""Checkpoints to examine: `clean` ones, as libraries save them, and ways to break them.

corpus = Corpus(tmp)
corpus.clean("qwen2")            a folder, made once
corpus.broken(BROKEN["..."])     a copy of a clean one, broken as somebody reported it
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Make = Callable[["Corpus", Path], object]
Break = Callable[[Path, "Corpus"], object]


@dataclass(frozen=True)
class Clean:
    """A checkpoint without a fault.

    Attributes:
        make: fills an empty folder.
        base: the clean model that it is examined with as base=; "" for none.
        slow: whether it takes many seconds to make.
        adapter: the clean adapter that was merged to make it; "" for none.
    """

    make: Make
    base: str = ""
    slow: bool = False
    adapter: str = ""


@dataclass(frozen=True)
class Broken:
    """A way in which people's checkpoints are broken.

    Attributes:
        code: the finding that has to come.
        of: the clean checkpoint that is copied.
        how: breaks the copy.
        issues: who reported it.
        base: the clean model given as base=; "" for none, "-" for that of the clean one.
        values: whether data has to be read to see it.
        adapter: the clean adapter given as adapter=; "" for none.
    """

    code: str
    of: str
    how: Break
    issues: tuple[str, ...] = ()
    base: str = "-"
    values: bool = False
    adapter: str = ""


@dataclass
class Corpus:
    """Makes clean checkpoints when they are asked for, each once.

    Attributes:
        root: where.
        known: clean checkpoints by name.
    """

    root: Path
    known: Mapping[str, Clean]
    _copies: int = field(default=0, repr=False)

    def clean(self, name: str) -> Path:
        """The folder of a clean checkpoint. Nobody changes it."""
        folder = self.root / "clean" / name
        if not folder.is_dir():
            making = self.root / "making" / name
            making.mkdir(parents=True, exist_ok=True)
            self.known[name].make(self, making)
            folder.parent.mkdir(exist_ok=True)
            making.rename(folder)
        return folder

    def base_of(self, name: str) -> Path | None:
        """Folder of the base that a clean checkpoint is examined with."""
        base = self.known[name].base
        return self.clean(base) if base else None

    def adapter(self, name: str) -> Path | None:
        """Folder of a clean adapter; None for ""."""
        return self.clean(name) if name else None

    def broken(self, case: Broken) -> Path:
        """A copy of its clean checkpoint, broken."""
        self._copies += 1
        folder = self.root / "broken" / str(self._copies) / case.of
        shutil.copytree(self.clean(case.of), folder)
        case.how(folder, self)
        return folder

    def base_for(self, case: Broken) -> Path | None:
        """Folder of the base that a broken one is examined with."""
        if case.base == "-":
            return self.base_of(case.of)
        return self.clean(case.base) if case.base else None
