"""Open the pages of a folder of runs: report, Prefect and MLflow, from servers on loopback.

    python flows/open.py                        the pages of the folder `runs`
    python flows/open.py paths.runs=DIR         of another folder of runs

Servers that do not run yet are started as by `make up`, and stay until `make down`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "open")
