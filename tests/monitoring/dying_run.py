"""A process that records a run up to step 12 of 40 and waits to be killed.

python -m tests.monitoring.dying_run RUNS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.monitoring.records import STEP, record_at, result

if __name__ == "__main__":
    with record_at(Path(sys.argv[1])) as record:
        record.call("prepare_base", lambda log: result("prepare_base"), {})
        with record.stage("train"):
            record.on_event({"event": "plan", "steps": 40})
            record.on_event({**STEP, "step": 10})
            record.on_event(STEP)
            record._write()
            print("ready", flush=True)
            time.sleep(600)
