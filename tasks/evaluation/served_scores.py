"""Scores of a served reward model, by the engine that serves it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.vllm_jobs import HEADROOM, Engine, run_vllm
from tasks.process.output import Log
from tasks.serving.vllm.job import Job


class Served(Engine, Protocol):
    """How the engine is run."""

    @property
    def max_model_len(self) -> int | None: ...


@dataclass(frozen=True)
class Scoring:
    """Who scores.

    Attributes:
        settings: how vLLM is run.
        scorer: the transformers child.
        log: progress and the engine's output.
        log_path: file for the engine's whole output.
    """

    settings: Served
    scorer: ReferenceScorer
    log: Log
    log_path: Path

    def raw(
        self, engine: str, model: ModelRef, texts: Sequence[Sequence[int]], *, out: Path
    ) -> list[float]:
        """The head's output at the end of each text, not normalised.

        Args:
            engine: "vllm" or "transformers".
            model: the served folder, its dtype, and the attention of transformers.
            texts: token ids.
            out: staging directory.

        Raises:
            StageProcessError: the engine did not come up or broke down.
        """
        if engine == "transformers":
            return self.scorer.rewards(model, texts, raw=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".vllm-") as folder:
            job = Job(
                served=str(model.path),
                out=f"{folder}/job",
                prompts=[list(text) for text in texts],
                max_new_tokens=0,
                max_model_len=self.settings.max_model_len or max(map(len, texts)) + HEADROOM,
                dtype=model.dtype,
                rewards=True,
            )
            (result,) = run_vllm([job], self.settings, log=self.log, log_path=self.log_path)
        scores: list[float] = result["rewards"]
        return scores
