"""Bisect two folders in a child process.

report = bisect(Side(a), Side(b), Options(texts=[...]), log=log, log_path=path)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.bisect.report import Report
from tasks.core.errors import ConfigError
from tasks.core.machine import available_memory, has_gpu
from tasks.evaluation.evaluation_prompts import dtype_of
from tasks.evaluation.scoring import ENV
from tasks.process.launch import launch, python_child
from tasks.process.output import Log

STAGE = "bisect"
TIMEOUT_S = 600.0
"""Default time limit, in seconds."""


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        path: Hugging Face folder; the base if there is an adapter.
        adapter: PEFT folder of an unmerged adapter on top.
        quantization: 4-bit quantization of the base, as in `scoring.ModelRef`.
        dtype: torch dtype name; None for that of config.json.
    """

    path: Path
    adapter: Path | None = None
    quantization: Mapping[str, Any] | None = None
    dtype: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the side for the child's job."""
        known = (self.path / "config.json").is_file()
        return {
            "path": str(self.path),
            "adapter": str(self.adapter) if self.adapter else None,
            "quantization": dict(self.quantization) if self.quantization else None,
            "dtype": self.dtype or (dtype_of(self.path) if known else "bfloat16"),
        }

    @property
    def nbytes(self) -> int:
        """Size of the weight files."""
        files = (file for kind in ("*.safetensors", "*.bin") for file in self.path.glob(kind))
        return sum(file.stat().st_size for file in files)


@dataclass(frozen=True)
class Options:
    """Settings of a bisection.

    Attributes:
        texts: texts to measure on.
        limit: maximum number of tokens of a text.
        profile: drift profile; below its limits nothing counts as a difference.
        engine: engine of b: `transformers` or `vllm`.
        attn_implementation: attention, by transformers' name.
        device: "cpu" or "cuda"; None for a GPU if there is one.
        threads: CPU threads; None leaves the choice to torch.
        timeout_s: time limit in seconds.
        ids: token ids of the probes, in place of texts.
    """

    texts: Sequence[str] = ()
    limit: int = 32
    profile: str = "strict"
    engine: str = "transformers"
    attn_implementation: str = "sdpa"
    device: str | None = None
    threads: int | None = None
    timeout_s: float = TIMEOUT_S
    ids: Sequence[Sequence[int]] = field(default_factory=tuple)


def bisect(a: Side, b: Side, options: Options, *, log: Log, log_path: Path) -> Report:
    """Find the first module in which two models part.

    Args:
        a: the model to compare with.
        b: the other model.
        options: settings.
        log: gets the child's output.
        log_path: file for the child's whole output.

    Raises:
        ConfigError: both do not fit into memory.
        StageProcessError: the child crashed, or was too slow.
    """
    needed, room = a.nbytes + b.nbytes, available_memory()
    if not has_gpu() and needed > room:
        raise ConfigError(
            f"both models together need {needed / 1e9:.0f} GB of memory, {room / 1e9:.0f} GB are "
            "free",
            hint="run it on a machine with more memory",
        )
    with tempfile.TemporaryDirectory(prefix="plumbline-bisect-") as name:
        folder = Path(name)
        job = {**asdict(options), "a": a.as_json(), "b": b.as_json(), "out": str(folder / "report")}
        (folder / "job.json").write_text(json.dumps(job))
        launch(
            python_child("tasks.bisect.child", str(folder / "job.json")),
            stage=STAGE,
            log=log,
            log_path=log_path,
            env=ENV,
            timeout_s=options.timeout_s,
        )
        return Report.from_json(json.loads((folder / "report").read_text()))
