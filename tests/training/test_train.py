"""Real torchrun with two ranks: the files of each kind of training, and its failures."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tasks.core.errors import ConfigError, DataError, StageProcessError, TrainingError
from tasks.drift.fingerprint import EXACT, Fingerprint, drift, within
from tasks.pipeline.report import StageReport
from tasks.train import train
from tasks.training.job import Peft, Zero
from tasks.weights.quantized.bnb_no_repack import keep_as_loaded
from tests.settings import Batch, Optim, Settings
from tests.weights.making import near_nf4

LOG = logging.getLogger("test")
CUT_AT = 36
"""Tokens: rows with words of six letters have one more and lose their end."""
SETTINGS = Settings(
    optim=Optim(lr=5e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=8, global_batch_size=32, max_steps=6, max_len=64),
    save_steps=3,
    probes=9,
)
SCENARIOS = {
    "qlora_zero2": replace(SETTINGS, peft=Peft("qlora", rank=8, alpha=16), zero=Zero(2)),
    "lora_zero3": replace(
        SETTINGS,
        peft=Peft("lora", rank=8, alpha=16, target_modules=("q_proj", "down_proj")),
        zero=Zero(3),
        optim=Optim(lr=2e-2, warmup_ratio=0.1),
        gradient_checkpointing=True,
    ),
    "full_zero3": replace(SETTINGS, zero=Zero(3), batch=replace(SETTINGS.batch, max_len=CUT_AT)),
}


@dataclass
class Run:
    out: Path
    settings: Settings
    report: StageReport
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    def json(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def stitched(self) -> dict[str, torch.Tensor]:
        """Join all trained tensors by the metadata of the shards alone."""
        shapes = {n: p["shape"] for n, p in self.json("partitions.json")["parameters"].items()}
        full = {n: torch.full((int(np.prod(s)),), torch.nan) for n, s in shapes.items()}
        for path in sorted((self.out / "shards").iterdir()):
            with safe_open(path, "pt") as file:
                for name, at in json.loads(file.metadata()["partitions"]).items():
                    full[name][at["start"] : at["end"]] = file.get_tensor(name).float()
        return {n: t.view(shapes[n]).bfloat16() for n, t in full.items()}


def run_train(
    folder: Path, base: Path, dataset: Path, settings: Settings, observe=None, **more: Any
) -> Run:
    out = folder / "out"
    out.mkdir()
    events: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        if observe is not None:
            observe(event)

    report = train(
        out,
        base=base,
        data=dataset,
        base_digest="b" * 64,
        settings=settings,
        checkpoints=folder / "checkpoints",
        max_truncated=0.4,
        log=LOG,
        log_path=folder / "train.log",
        on_event=on_event,
        **more,
    )
    return Run(out, settings, report, events)


@pytest.fixture(
    scope="module",
    params=[
        # The main job has an adapter, and test_adapters.py has its stages.
        pytest.param("qlora_zero2", marks=pytest.mark.slow),
        pytest.param("lora_zero3", marks=pytest.mark.slow),
        "full_zero3",
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory, base, dataset) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    return run_train(folder, base, dataset, SCENARIOS[request.param])


def test_the_loss_falls_and_is_reported(run: Run) -> None:
    steps = run.of("step")
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    before, after = run.of("eval")
    assert before["when"] == "before"
    assert after["loss"] < before["loss"] - 0.1
    assert before["tokens"] == after["tokens"]
    assert [e["kept"] for e in run.of("data")] == [128, 17]
    assert run.json("train.json")["losses"] == [e["loss"] for e in steps]
    assert all(check.ok for check in run.report.checks)


def test_truncated_rows_are_metrics(run: Run, dataset: Path) -> None:
    for split in ("train", "heldout"):
        lines = (dataset / f"{split}.jsonl").read_text().splitlines()
        words = [json.loads(line)["messages"][1]["content"] for line in lines]
        cut = sum(len(word) == 6 for word in words) * (run.settings.batch.max_len == CUT_AT)
        assert cut or run.settings.batch.max_len > CUT_AT
        counted = {
            name.removeprefix(f"data/{split}_"): value
            for name, value in run.report.metrics.items()
            if name.startswith(f"data/{split}_")
        }
        assert counted == {
            "rows": len(words), "truncated": cut, "tokens_cut": cut, "ends_cut": cut, "too_long": 0,
            "equal": 0,
        }  # fmt: skip


def test_partitions_cover_every_trained_tensor(run: Run) -> None:
    full = run.stitched()
    layers, adapter = 2, {"qlora_zero2": 7, "lora_zero3": 2}
    names = {p.kind: n for p, n in ((s.peft, k) for k, s in SCENARIOS.items())}
    scenario = names[run.settings.peft.kind]
    expected = 2 * layers * adapter[scenario] if scenario in adapter else 26
    assert len(full) == expected
    assert all(torch.isfinite(t).all() and t.numel() for t in full.values())
    if scenario in adapter:
        assert all(t.any() for n, t in full.items() if "lora_B" in n)


def test_stitched_weights_are_the_model_that_was_trained(run: Run, base: Path) -> None:
    """An independent scorer gives the live engine's fingerprint on the joined tensors."""
    model = load_trained(run, base).eval()
    reference = Fingerprint.load(run.out / "fingerprint.fp")
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = [
            torch.log_softmax(model(torch.tensor([p])).logits[0, :-1].float(), dim=-1)
            for p in reference.probes
        ]
    logprobs = torch.cat(rows)
    found = replace(
        reference,
        logprobs=logprobs.gather(1, torch.from_numpy(reference.ids).long()).numpy(),
        top1=logprobs.argmax(-1).int().numpy(),
        engine="test",
    )
    assert reference.positions == sum(len(p) - 1 for p in reference.probes)
    assert reference.noise is not None
    assert within(drift(reference, found), EXACT, noise=reference.noise) == []


def load_trained(run: Run, base: Path) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    extra: dict[str, Any] = {}
    if run.json("train.json")["quantization"] is not None:
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, **extra)
    if run.settings.peft.kind != "none":
        config = LoraConfig(**_lora_keys(run.json("adapter_config.json")))
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    parameters = dict(model.named_parameters())
    for name, tensor in run.stitched().items():
        assert parameters[name].shape == tensor.shape
        parameters[name].data = tensor
    return keep_as_loaded(model)


def _lora_keys(document: dict[str, Any]) -> dict[str, Any]:
    return {k: document[k] for k in ("r", "lora_alpha", "target_modules", "task_type")}


def test_trained_side_files(run: Run, tokenizer) -> None:
    names = {p.name for p in run.out.iterdir()}
    wanted = {"shards", "partitions.json", "train.json", "config.json", "tokenizer"}
    wanted |= {"generation_config.json", "fingerprint.fp"}
    adapted = run.settings.peft.kind != "none"
    assert names == wanted | ({"adapter_config.json"} if adapted else set())
    assert "quantization_config" not in run.json("config.json")
    assert run.json("generation_config.json")["eos_token_id"] == tokenizer.eos_token_id
    assert run.json("partitions.json")["dtype"] == "BF16"
    assert run.json("train.json")["base_digest"] == "b" * 64
    assert run.json("train.json")["attn_implementation"] == "sdpa"


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, base: Path, dataset: Path
) -> None:
    settings = replace(
        SETTINGS,
        optim=Optim(lr=1e30, scheduler="linear", warmup_ratio=0.9),
        peft=Peft("lora", rank=4, alpha=4),
        zero=Zero(0),
        save_steps=1,
    )
    # A rate that rises linearly to 1e30 leaves bf16 within a step or two.
    with pytest.raises(TrainingError, match=r"in step \d|after step \d") as caught:
        run_train(tmp_path, base, dataset, settings)
    assert "last good checkpoint" in caught.value.report()
    assert not (tmp_path / "out" / "train.json").exists()


def test_a_merged_qlora_model_is_not_quantised_again(tmp_path: Path, dataset: Path) -> None:
    settings = replace(SETTINGS, peft=Peft("qlora", rank=4, alpha=4))
    with pytest.raises(
        ConfigError, match="merged QLoRA model: model.layers.0.mlp.up_proj"
    ) as caught:
        run_train(tmp_path, near_nf4(tmp_path / "merged", 0.01), dataset, settings)
    assert caught.value.hint == "peft=lora, or model.path=<the base before that training>"


@pytest.mark.slow  # tests/process/test_torchrun.py and tests/e2e/test_bad_input.py end ranks, too
def test_a_rank_that_dies_ends_all_of_them(tmp_path: Path, base: Path, dataset: Path) -> None:
    settings = replace(SETTINGS, batch=replace(SETTINGS.batch, max_steps=100_000), save_steps=2)
    killed: list[float] = []

    def kill_one(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 5 and not killed:
            os.kill(_rank_pids(tmp_path)[1], signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(StageProcessError) as caught:
        run_train(tmp_path, base, dataset, settings, observe=kill_one)
    assert time.monotonic() - killed[0] < 30
    assert any("was killed by SIGKILL" in line for line in caught.value.details)
    assert _rank_pids(tmp_path) == []
    kept = [p for p in (tmp_path / "checkpoints").glob("step-*") if (p / "state.json").exists()]
    assert len(kept) >= 1


def _rank_pids(folder: Path) -> list[int]:
    """Return the processes that run this job, without torchrun and its parents."""
    mark = f"tasks.training\0{(folder / 'checkpoints' / 'job.json').resolve()}"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if mark in text and "torch.distributed.run" not in text:
            found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.slow  # tokens/test_truncation.py has the error, tokens/test_bad_input.py the child's
def test_prompts_longer_than_the_context_are_named(
    tmp_path: Path, base: Path, dataset: Path
) -> None:
    settings = replace(SETTINGS, batch=replace(SETTINGS.batch, max_len=8))
    with pytest.raises(DataError, match=r"s0: prompt of \d+ tokens leaves no room in 8") as caught:
        run_train(tmp_path, base, dataset, settings)
    assert "train.on_overlong=refuse" in caught.value.hint
