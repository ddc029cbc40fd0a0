"""Get scores from a served reward model in vLLM or transformers."""

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


class ScoringSettings(Engine, Protocol):
    """Settings of vLLM, and the longest sequence in tokens."""

    @property
    def max_model_len(self) -> int | None: ...


@dataclass(frozen=True)
class Scoring:
    """Scores texts with a reward model in either engine.

    Attributes:
        settings: settings of vLLM.
        scorer: the transformers child.
        log: gets progress and the engine's output.
        log_path: file for the engine's whole output.
    """

    settings: ScoringSettings
    scorer: ReferenceScorer
    log: Log
    log_path: Path

    def raw(
        self, engine: str, model: ModelRef, texts: Sequence[Sequence[int]], *, out: Path
    ) -> list[float]:
        """Return the head's output at the last token of each text, not normalised.

        Args:
            engine: "vllm" or "transformers".
            model: the served folder, its dtype, and the attention implementation of transformers.
            texts: token ids of each text.
            out: staging directory.

        Raises:
            StageProcessError: the engine did not start or crashed.
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
