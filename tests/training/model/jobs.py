"""Several short trainings in one launch of two ranks, and the files that they wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from tasks.training.job import TrainJob
from tasks.weights.quantized.bnb_no_repack import keep_as_loaded
from tests.commands import run_ranks
from tests.settings import Settings


class Wanted(NamedTuple):
    """A job: settings, a model folder and a folder of examples."""

    settings: Settings
    base: Path
    data: Path


@dataclass(frozen=True)
class Left:
    """Files that a job wrote to its folder."""

    out: Path
    wanted: Wanted

    def json(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    @property
    def losses(self) -> list[float]:
        return list(self.json("losses.json"))

    def stitched(
        self, folder: str = "shards", dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, torch.Tensor]:
        """Join all trained tensors by the metadata of the shards alone."""
        shapes = {n: p["shape"] for n, p in self.json("partitions.json")["parameters"].items()}
        full = {n: torch.full((int(np.prod(s)),), torch.nan) for n, s in shapes.items()}
        for path in sorted((self.out / folder).iterdir()):
            with safe_open(path, "pt") as file:
                for name, at in json.loads(file.metadata()["partitions"]).items():
                    full[name][at["start"] : at["end"]] = file.get_tensor(name).float()
        return {n: t.view(shapes[n]).to(dtype) for n, t in full.items()}


def run_jobs(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, Left]:
    """Run all jobs in turn; a failed job raises when its results are read."""
    paths = []
    for name, one in wanted.items():
        out = folder / name
        out.mkdir(parents=True)
        job = TrainJob(one.settings, one.base, "d", one.data, out, out / "checkpoints")
        paths.append(str(out / "job.json"))
        job.write(out / "job.json")
    run_ranks("tests.training.several_jobs", *paths, log_path=folder / "log")
    for name in wanted:
        failure = folder / name / "failure"
        assert not failure.exists(), f"{name}: {failure.read_text()}"
    return {name: Left(folder / name, one) for name, one in wanted.items()}


def load_trained(left: Left, auto: Any, **extra: Any) -> torch.nn.Module:
    """Load the trained model with peft and transformers, without code of this project."""
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    peft = left.wanted.settings.peft
    if peft.kind == "qlora":
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=peft.quant_type,
            bnb_4bit_use_double_quant=peft.double_quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = auto.from_pretrained(left.wanted.base, dtype=torch.bfloat16, **extra)
    if peft.kind != "none":
        said = left.json("adapter_config.json")
        known = {"peft_type", "peft_version", "auto_mapping", "inference_mode"}
        config = LoraConfig(**{key: value for key, value in said.items() if key not in known})
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    parameters = dict(model.named_parameters())
    for name, tensor in left.stitched().items():
        assert parameters[name].shape == tensor.shape
        parameters[name].data = tensor
    return keep_as_loaded(model).eval()
