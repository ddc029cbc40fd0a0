"""Quantise a model to 4 bits with llm-compressor: GPTQ (Frantar et al. 2022, arXiv:2210.17323).

    .venv-quantize/bin/python tasks/weights/quantized/gptq.py JOB.json

A program of its own: llm-compressor needs other versions of transformers and compressed-tensors
than vLLM, so it runs in the environment of `make setup-quantize`, where the rest of this project is
not installed. `tasks/quantize.py` starts it. JOB.json has:

    model    folder of the model
    out      folder to write
    dtype    torch dtype name
    rows     token ids of the calibration rows
    ignore   names of linear layers that stay as they are
    group    numbers of a row that share a scale
    shard    largest file, in bytes
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    """Run the job in a JSON file."""
    job = json.loads(Path(path).read_text())
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=job["dtype"], local_files_only=True
    )
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["rows"]]
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True,
        "strategy": "group", "group_size": job["group"],
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    oneshot(
        model=model,
        tokenizer=job["model"],
        dataset=Dataset.from_list(rows),
        recipe=GPTQModifier(config_groups=groups, ignore=job["ignore"]),
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, job["rows"])),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(job["out"], save_compressed=True, max_shard_size=int(job["shard"]))


if __name__ == "__main__":
    main(sys.argv[1])
