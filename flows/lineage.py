"""Walk from a served model back through manifests to the rows that it was trained on.

    python flows/lineage.py models:/plumbline@champion          of a registered version
    python flows/lineage.py DIR paths.runs=RUNS                 of a served folder
    python flows/lineage.py models:/plumbline/3 json=true       the same as JSON

Every artifact has a line: digest, stage, time, folder. A dataset has the hashes of its rows. Exit
status: 0, 1 a manifest cannot be read, 2 no such version or folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "lineage")
