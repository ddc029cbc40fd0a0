"""Post-train a language model and prove that the served model is the trained one.

    python flows/rlhf.py +exp=qlora                        the whole chain, on the embedded toy
    python flows/rlhf.py +exp=qlora plan=true              print what it would do; start nothing
    python flows/rlhf.py +exp=sft_qlora model.path=/models/x data.path=c.jsonl
    python flows/rlhf.py +exp=qlora steps.ppo.train.lr=1e-4    for one step of the chain
    python flows/rlhf.py +exp=grpo --help rl rollout       settings of two sections, with values
    python flows/rlhf.py --multirun +exp=sft_qlora,lora_zero3  several runs, one after the other

Works from any directory. Exit status: 0 done, 1 a stage failed, 2 the configuration is wrong and
nothing was started, 3 the model is complete and not registered because MLflow did not answer, 130,
143 and 129 after Ctrl-C, SIGTERM and a closed terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Before Prefect is imported, because it then reads its environment, which the command sets.
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.chain.run_chain")

from typing import Any

from prefect import flow

from flows.chain.run_chain import prepare, run_chain
from flows.orchestration.flow_body import reported


@flow(name="rlhf", flow_run_name="rlhf-{tag}", persist_result=False)
def rlhf(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Run a post-training chain, from base model and data to a registered, served model.

    `overrides` are Hydra's, e.g. `["+exp=qlora", "train.lr=1e-4"]`; `tag` is free text that tells
    runs apart in lists. Returns the summary, as in `<paths.runs>/latest/summary.json`.
    """
    return reported(lambda: run_chain(*prepare(overrides or [])))
