"""peft's own save under ZeRO-3 writes empty tensors, in the installed versions, too."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import ContractError
from tasks.training.job import Peft, TrainJob, Zero
from tasks.weights.files.header import read_header
from tests.commands import run_ranks
from tests.settings import Batch, Settings


@pytest.mark.slow
def test_peft_saves_empty_tensors_under_zero3_and_partitions_do_not(
    tmp_path: Path, base: Path, dataset: Path
) -> None:
    settings = Settings(peft=Peft("lora", rank=8), zero=Zero(3), batch=Batch(1, 2))
    out, checkpoints = tmp_path / "out", tmp_path / "checkpoints"
    out.mkdir()
    job = TrainJob(settings, base, "d", dataset, out, checkpoints)
    job.write(tmp_path / "job.json")
    run_ranks(
        "tests.training.engine.naive_save",
        str(tmp_path / "job.json"),
        log_path=tmp_path / "log",
        TORCHDYNAMO_DISABLE="1",
    )
    naive = read_header(out / "naive" / "adapter_model.safetensors").tensors
    assert len(naive) == 2 * 7 * 2
    assert {info.shape for info in naive.values()} == {(0,)}

    covered: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in (out / "shards").iterdir():
        for name, at in json.loads(read_header(path).metadata["partitions"]).items():
            covered[name] = covered.get(name, 0) + at["end"] - at["start"]
            shapes[name] = tuple(at["shape"])
    assert len(covered) == 28
    assert covered == {name: math.prod(shape) for name, shape in shapes.items()}

    contract = [Expected(n.replace(".default", ""), s, "BF16") for n, s in shapes.items()]
    with pytest.raises(ContractError, match=r"28 failed, first .*lora_A.weight: expected BF16"):
        require(judge(contract, naive), stage="gather")
