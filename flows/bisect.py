"""Find the module in which two models part, from their hidden states and their tensors.

    python flows/bisect.py a=DIR b=DIR                     the first module that differs, and why
    python flows/bisect.py a=BASE a_adapter=DIR b=MERGED   an unmerged adapter against its merge
    python flows/bisect.py a=DIR b=DIR out=report.json     the report as JSON; out=- prints it
    python flows/bisect.py a=DIR b=DIR b_dtype=float32     load b in another dtype
    python flows/bisect.py a=DIR b=DIR profile=standard    a wider gate: below it nothing differs

a is the model that is right. Every module of b gets the inputs that it had in a, so a fault shows
in its own module and rounding does not add up. Needs memory for both models. Works from any
directory and writes nothing into a and b. Exit status: 0 no difference above noise and gate, 1 they
part, 2 they cannot be compared, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Also keeps this file from hiding Python's own module of the same name.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "bisect")
