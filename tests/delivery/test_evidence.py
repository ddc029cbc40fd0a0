"""The base of a foreign adapter is chosen from the trainer's files, or the adapter is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.delivery.evidence import Precision, find_evidence
from tests.delivery.conftest import Done
from tests.delivery.making import differing, merged_as_trained
from tests.weights.making import state_of

Run = Callable[..., Done]

SWIFT = {"tuner_type": "lora", "model": "Qwen/Qwen3-8B", "quant_method": None, "quant_bits": None}
FOUR = {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "torch.bfloat16"}  # fmt: skip
FACTORY = "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: Qwen/Qwen3-8B\n"
AXOLOTL = "base_model: Qwen/Qwen3-8B\nadapter: {}\nload_in_4bit: {}\nload_in_8bit: false\n"
CARD = """---
library_name: peft
---
<details><summary>See axolotl config</summary>

axolotl version: `0.11.0`
```yaml
{}```
"""
OLD_CARD = """---
library_name: peft
---
## Training procedure

The following `bitsandbytes` quantization config was used during training:
- quant_method: bitsandbytes
- load_in_8bit: False
- load_in_4bit: True
- llm_int8_skip_modules: None
- bnb_4bit_quant_type: fp4
- bnb_4bit_use_double_quant: False
- bnb_4bit_compute_dtype: float16

### Framework versions
"""
SNIPPET = """---
library_name: peft
---
```python
quantization_config = BitsAndBytesConfig(load_in_4bit=True)
```
Run it with `load_in_4bit: true` if memory is short.
"""
NF4 = {"type": "nf4", "double_quant": True}

RECORDS: dict[str, tuple[str, str, Precision, dict[str, Any]]] = {
    "ms-swift, 4 bits": ("args.json", json.dumps({**SWIFT, **FOUR}), Precision.FOUR,
                         {**NF4, "compute_dtype": "bfloat16"}),
    "ms-swift, LoRA": ("args.json", json.dumps(SWIFT), Precision.FULL, {}),
    "ms-swift, 8 bits": ("args.json", json.dumps({**SWIFT, **FOUR, "quant_bits": 8}),
                         Precision.OTHER, {}),
    "ms-swift 2": ("sft_args.json", json.dumps({"sft_type": "lora", "quantization_bit": 4}),
                   Precision.FOUR, {}),
    "LLaMA-Factory, 4 bits": ("training_args.yaml", FACTORY + "quantization_bit: 4\n"
                              "double_quantization: false\n", Precision.FOUR,
                              {"double_quant": False}),
    "LLaMA-Factory, LoRA": ("llamafactory_args.yaml", FACTORY + "quantization_method: bnb\n",
                            Precision.FULL, {}),
    "LLaMA-Factory, hqq": ("training_args.yaml", FACTORY + "quantization_bit: 4\n"
                           "quantization_method: hqq\n", Precision.OTHER, {}),
    "LLaMA Board": ("llamaboard_config.yaml", "top.finetuning_type: lora\n"
                    "top.quantization_bit: '4'\ntop.quantization_method: bnb\n",
                    Precision.FOUR, {}),
    "axolotl, 4 bits": ("axolotl.yaml", AXOLOTL.format("qlora", "true"), Precision.FOUR, {}),
    "axolotl, LoRA": ("config.yml", AXOLOTL.format("lora", "false"), Precision.FULL, {}),
    "axolotl's card": ("README.md", CARD.format(AXOLOTL.format("qlora", "true")),
                       Precision.FOUR, {}),
    "peft's card": ("README.md", OLD_CARD, Precision.FOUR,
                    {"type": "fp4", "double_quant": False, "compute_dtype": "float16"}),
    "card, base's name": ("README.md", "---\nbase_model: unsloth/Qwen3-8B-bnb-4bit\n---\n",
                          Precision.FOUR, NF4),
    "unsloth": ("adapter_config.json",
                json.dumps({"base_model_name_or_path": "unsloth/Qwen3-8B-bnb-4bit"}),
                Precision.FOUR, NF4),
    "unsloth, dynamic": ("adapter_config.json",
                         json.dumps({"base_model_name_or_path": "unsloth/Qwen3-unsloth-bnb-4bit"}),
                         Precision.OTHER, {}),
    "on AWQ": ("adapter_config.json",
               json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B-AWQ"}), Precision.OTHER, {}),
    "config.json beside it": (
        "config.json",
        json.dumps({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True,
                                            "bnb_4bit_quant_type": "nf4"}}),
        Precision.FOUR, {"type": "nf4"}),
    "some modules in 16 bits": (
        "config.json",
        json.dumps({"quantization_config": {"load_in_4bit": True,
                                            "llm_int8_skip_modules": ["lm_head", "q_proj"]}}),
        Precision.OTHER, {}),
}  # fmt: skip


def test_records_are_read(tmp_path: Path) -> None:
    missed = []
    for name, (file, text, precision, quantization) in RECORDS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).write_text(text)
        records = find_evidence(folder)
        if [(r.file, r.precision, r.quantization) for r in records] != [
            (folder / file, precision, quantization)
        ]:
            missed.append((name, records))
    assert missed == []


def test_files_without_evidence(tmp_path: Path) -> None:
    for number, (file, text) in enumerate(
        (
            ("README.md", SNIPPET),  # how to run it, not how it was trained
            ("README.md", "---\nbase_model: Qwen/Qwen3-8B\n---\n"),
            ("adapter_config.json", json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"})),
            ("config.json", json.dumps({"model_type": "qwen3"})),
            ("args.json", json.dumps({"learning_rate": 1e-4})),
            ("args.json", "{ not json"),
            ("config.yaml", "a: [b"),
            ("config.yaml", "model: Qwen/Qwen3-8B\n"),
            ("training_args.bin", "not a zip file"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file).write_text(text)
        assert find_evidence(folder) == (), (file, text)


def test_arguments_that_trl_pickled(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig
    from trl import SFTConfig

    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    for name, kwargs in {"qlora": {"quantization_config": four}, "lora": {}}.items():
        settings = SFTConfig(
            str(tmp_path / name), model_init_kwargs=kwargs, use_cpu=True, bf16=False
        )
        (tmp_path / name).mkdir()
        torch.save(settings, tmp_path / name / "training_args.bin")
    (record,) = find_evidence(tmp_path / "qlora")
    assert record.precision is Precision.FOUR
    assert record.quantization == {
        "type": "nf4", "double_quant": False, "compute_dtype": "bfloat16",
    }  # fmt: skip
    assert find_evidence(tmp_path / "lora") == ()  # its model may have been loaded by the script


def test_the_folders_above_belong_to_the_run(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-10" / "adapter"
    step.mkdir(parents=True)
    (tmp_path / "run" / "args.json").write_text(json.dumps(SWIFT))
    (record,) = find_evidence(step)
    assert record.file == tmp_path / "run" / "args.json"
    (tmp_path / "mine").mkdir()
    (tmp_path / "args.json").write_text(json.dumps(SWIFT))
    assert find_evidence(tmp_path / "mine") == ()  # no folder of a run
    (tmp_path / "trainer_state.json").write_text("{}")
    assert len(find_evidence(tmp_path / "mine")) == 1
    deep = tmp_path / "checkpoint-1" / "checkpoint-2" / "checkpoint-3"
    deep.mkdir(parents=True)
    assert find_evidence(deep) == ()  # too far up


@pytest.fixture
def foreign(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


EIGHT = {**SWIFT, **FOUR, "quant_bits": 8}
REFUSED: dict[str, tuple[dict[str, str], list[str]]] = {
    "no evidence": ({}, [f"merge.base={each}" for each in ("original", "dequantized")]),
    "contradictions": (
        {"args.json": json.dumps(SWIFT), "README.md": OLD_CARD},
        ["args.json: tuner_type: lora", "README.md: load_in_4bit: true"],
    ),
    "eight bits": ({"args.json": json.dumps(EIGHT)}, ["quant_bits: 8", "merge.base=original"]),
}


def test_a_delivery_without_clear_evidence_is_refused(here: Run, foreign: Path, base: Path) -> None:
    for name, (files, parts) in REFUSED.items():
        for file, text in files.items():
            (foreign / file).write_text(text)
        done = here(f"source={foreign}", f"base={base}", code=2)
        assert [part for part in parts if part not in done.output] == [], name
        for file in files:
            (foreign / file).unlink()


def test_a_delivery_goes_by_the_trainers_files(here, foreign, base, tmp_path) -> None:
    record = foreign / "args.json"
    record.write_text(json.dumps(SWIFT))
    words = (f"source={foreign}", f"base={base}")
    planned = here(*words, "plan=true").output.splitlines()
    (line,) = (each for each in planned if "merge into" in each)
    assert "original" in line
    against = here(*words, "plan=true", "merge.base=dequantized").output
    (line,) = (each for each in against.splitlines() if "warning: merge.base" in each)
    assert str(record) in line

    record.write_text(json.dumps({**SWIFT, **FOUR}))
    here(*words)
    assert differing(state_of(tmp_path / "out"), merged_as_trained(base, foreign)) == []
    notes = json.loads((tmp_path / "out" / "manifest.json").read_text())["notes"]
    assert notes["merge_base"]["base"] == "dequantized"
    assert str(record) in notes["merge_base"]["decided_by"]
