"""Let the alias `champion` name a registered version, or roll back to an earlier one.

    python flows/promote.py models:/plumbline/3                  by number
    python flows/promote.py models:/plumbline@candidate          the model that was trained last
    python flows/promote.py models:/plumbline/2 verify=key.pub   only if this key signed its folder

Every byte of the served folder is compared with what was registered before the alias moves. Exit
status: 0 done, 1 the folder is not what was registered, 2 no such version or MLflow does not
answer; the alias stays unless the status is 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "promote")
