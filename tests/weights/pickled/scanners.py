"""Write the verdicts of three other scanners as JSON; runs in their environment (peers.sh).

Arguments: a folder of folders with one file each, the file to write. Verdicts: docs/pickle-scan.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fickling.analysis import check_safety
from fickling.fickle import StackedPickle
from modelscan.modelscan import ModelScan
from picklescan.scanner import scan_directory_path, scan_file_path

ORDER = ("caught", "suspicious", "error", "passes", "skipped")


def picklescan(path: Path) -> str:
    """Return the better verdict of the file and its folder; the latter goes by suffixes."""
    both = _picklescan(scan_file_path, path), _picklescan(scan_directory_path, path.parent)
    return min(both, key=ORDER.index)


def _picklescan(scan: Any, path: Path) -> str:
    try:
        result = scan(str(path))
    except Exception:
        return "error"
    if result.issues_count:
        return "caught"
    if result.suspicious_count:
        return "suspicious"
    if result.scan_err:
        return "error"
    return "passes" if result.scanned_files else "skipped"


def fickling(path: Path) -> str:
    try:
        with path.open("rb") as file:
            safe = all(check_safety(pickled) for pickled in StackedPickle.load(file))
        return "passes" if safe else "caught"
    except Exception:
        return "error"


def modelscan(path: Path) -> str:
    scanner = ModelScan()
    try:
        scanner.scan(path)
    except Exception:
        return "error"
    if scanner.issues.all_issues:
        return "caught"
    if scanner.errors:
        return "error"
    return "passes" if scanner.scanned else "skipped"


def main(root: Path, out: Path) -> None:
    verdicts = {}
    for folder in sorted(root.iterdir()):
        (path,) = folder.iterdir()
        verdicts[folder.name] = [scan(path) for scan in (picklescan, fickling, modelscan)]
    out.write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
