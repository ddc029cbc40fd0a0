"""Deliver a checkpoint made elsewhere: gather, merge, convert, check, and write it for vLLM.

    python flows/deliver.py DIR base=DIR out=DIR               adapter, model, DeepSpeed, FSDP
    python flows/deliver.py DIR out=DIR plan=true              print what it would do; start nothing
    python flows/deliver.py DIR base=DIR out=DIR smoke.engine=none     the weights alone, fast
    python flows/deliver.py DIR base=DIR out=DIR merge.base=dequantized    a QLoRA adapter
    python flows/deliver.py DIR base=DIR out=DIR convert.dtype=float16

DIR without a key is `source=DIR`. It is audited first, as by `flows/audit.py`; the delivery is
refused if it has errors that a delivery does not repair. Works from any directory. Exit status: 0
done, 1 a stage failed, 2 source, base or configuration are wrong and nothing was written, 130, 143
and 129 after Ctrl-C, SIGTERM and a closed terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Before Prefect is imported, because it then reads its environment. With smoke.engine=none it
    # is not imported at all.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.delivery.run_delivery")

from typing import Any

from prefect import flow

from flows.delivery.run_delivery import prepare, run_in_prefect
from flows.orchestration.flow_body import reported


@flow(name="deliver", flow_run_name="deliver-{tag}", persist_result=False)
def deliver(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Turn a checkpoint into a served model: the second half of the chain.

    `overrides` are Hydra's, e.g. `["source=/ckpt", "base=/models/qwen", "out=/served"]`; `tag` is
    free text that tells runs apart in lists. Returns the summary, as in
    `<paths.runs>/latest/summary.json`.
    """
    return reported(lambda: run_in_prefect(*prepare(overrides or []), overrides or []))
