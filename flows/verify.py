"""Ask a running server, and say whether it is the model that was trained.

    python flows/verify.py url=http://host:8000 source=DIR       the verdict, in seconds
    python flows/verify.py url=URL source=DIR name=my-lora       one of several models
    python flows/verify.py url=URL source=DIR out=report.json    as JSON; out=report.xml as JUnit
    python flows/verify.py url=URL source=DIR watch=60           again every 60 s, for monitoring
    python flows/verify.py url=URL source=DIR prefect=true       recorded: a flow run, an MLflow run

DIR has a folder plumbline.witness, which the trainer wrote, or was served by Plumbline. It needs no
GPU and no torch. The API key of the server is read from the variable PLUMBLINE_API_KEY. Exit
status: 0 verified, 1 a fault was found, 2 the server could not be verified, or the command line is
wrong. docs/verify.md says what is proven and what cannot be.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Before Prefect is imported, which takes longer than a verification.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "verify")

from typing import Any

from prefect import flow

from flows.orchestration.flow_body import reported
from flows.orchestration.verify_record import recorded


@flow(name="verify", flow_run_name="verify-{tag}", persist_result=False)
def verify(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Verify a running server as a flow, for schedules and for records (`prefect=true`).

    The flow run fails if a fault was found, or if the server could not be verified.

    Args:
        overrides: words of the command, e.g. `["url=http://host:8000", "source=/ckpt"]`.
        tag: free text that tells runs apart in lists.

    Returns:
        The report, as in `out=FILE.json`.
    """
    return reported(lambda: recorded(overrides or []))
