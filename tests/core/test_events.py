"""Events of training steps are kept beside the checkpoints, for a resumed run to replay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tasks.core.events import EVENTS, parse, rewind

PROGRAM = """
import sys
from pathlib import Path
from tasks.core.events import emit, keep_in
keep_in(Path(sys.argv[1]))
for step in range(1, 8):
    emit("step", step=step, loss=1 / step)
    emit("ready", step=step)
    if step % 4 == 0:
        emit("eval", when="during", step=step, loss=2 / step)
"""


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    """Killed after step 7, with a checkpoint of step 4: steps 5 to 7 are taken again."""
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    events = [event for line in done.stdout.splitlines() if (event := parse(line))]
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "step", "st')  # cut off by the kill
    kept = rewind(tmp_path, 4)
    times = [event.pop("at") for event in kept]
    assert times == sorted(times)
    assert kept == [e for e in events if e["event"] in ("step", "eval") and e["step"] <= 4]
    assert len((tmp_path / EVENTS).read_text().splitlines()) == len(kept) == 5
