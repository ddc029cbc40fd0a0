"""Show what runs and what ran in a folder of runs, from its files alone.

    python flows/status.py                      runs in progress and the last ten that ended
    python flows/status.py paths.runs=DIR       of another folder of runs
    python flows/status.py limit=0              all of them
    python flows/status.py json=true            the same as JSON, with all numbers of the last step

No server is asked, so it works while a run goes on, after `kill -9`, and for runs on other machines
that write to the same folder. Exit status: 0, or 2 if there is no such folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "status")
