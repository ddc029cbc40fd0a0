"""Checkpoints to examine: clean ones, as libraries save them, and ways to break them.

corpus = Corpus(tmp)
corpus.clean("qwen2")            a folder, made once
corpus.broken(BROKEN["..."])     a copy of a clean one, broken as in a public report
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
    """A checkpoint without faults.

    Attributes:
        make: fills an empty folder.
        base: name of the clean model to examine it with as `base=`; "" for none.
        adapter: name of the clean adapter that was merged to make it; "" for none.
    """

    make: Make
    base: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class Broken:
    """A way in which checkpoints of users are broken; `issues` of its check lists the reports.

    Attributes:
        code: the expected finding.
        of: name of the clean checkpoint to copy.
        how: breaks the copy; None if the fault lies in the arguments of the audit.
        base: name of the clean model for `base=`; "" for none, "-" for that of the clean one.
        values: True if only data shows the fault.
        adapter: name of the clean adapter for `adapter=`; "" for none.
        severity: that of the finding; "" where it does not matter.
    """

    code: str
    of: str
    how: Break | None
    base: str = "-"
    values: bool = False
    adapter: str = ""
    severity: str = ""


@dataclass
class Corpus:
    """Clean checkpoints, each made once on demand.

    Attributes:
        root: folder to make them in.
        known: clean checkpoints by name.
    """

    root: Path
    known: Mapping[str, Clean]
    _copies: int = field(default=0, repr=False)

    def clean(self, name: str) -> Path:
        """Return the folder of a clean checkpoint. Tests must not change it."""
        folder = self.root / "clean" / name
        if not folder.is_dir():
            making = self.root / "making" / name
            making.mkdir(parents=True, exist_ok=True)
            self.known[name].make(self, making)
            folder.parent.mkdir(exist_ok=True)
            making.rename(folder)
        return folder

    def base_of(self, name: str) -> Path | None:
        """Return the folder of the base of a clean checkpoint, or None."""
        base = self.known[name].base
        return self.clean(base) if base else None

    def adapter(self, name: str) -> Path | None:
        """Return the folder of a clean adapter; None for ""."""
        return self.clean(name) if name else None

    def broken(self, case: Broken) -> Path:
        """Return a broken copy of a clean checkpoint."""
        self._copies += 1
        folder = self.root / "broken" / str(self._copies) / case.of
        shutil.copytree(self.clean(case.of), folder)
        if case.how is not None:
            case.how(folder, self)
        return folder

    def base_for(self, case: Broken) -> Path | None:
        """Return the folder of the base of a broken checkpoint, or None."""
        if case.base == "-":
            return self.base_of(case.of)
        return self.clean(case.base) if case.base else None
