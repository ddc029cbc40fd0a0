"""Compare two runs: what was set differently, and which model is better.

    python flows/compare.py A B                        two runs of paths.runs by name, or by its end
    python flows/compare.py runs/reports/X latest      a run's folder, and the last run
    python flows/compare.py A/summary.json B/report.html    by their files

Shows the settings that differ, drift of every hand-off, the evaluation with 95 % bootstrap
intervals, and final metrics. Reads files only. Exit status: 0 whether they differ or not, 2 a run
cannot be found or read, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "compare")
