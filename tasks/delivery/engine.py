"""What every smoke test needs of the engine that serves: how it is run, what it is asked with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation.scoring import ReferenceScorer
from tasks.evaluation.vllm_jobs import HEADROOM, run_vllm
from tasks.serving.vllm.job import Job

SHORTEST = 2
"""Tokens of a probe: one to start from and one to score."""


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is run. See `tasks/config/deliver_flow.py`."""

    greedy_tokens: int = 5
    kv_cache_gib: int = 1
    max_model_len: int | None = None
    timeout_s: float | None = None
    threads: int | None = None

    def longest(self, prompts: Sequence[Sequence[int]]) -> int:
        """Tokens of the longest sequence."""
        need = max(len(prompt) for prompt in prompts) + self.greedy_tokens
        return self.max_model_len or need + HEADROOM


def ask_vllm(
    job: Job, settings: EngineSettings, *, out: Path, log: Any, log_path: Path
) -> dict[str, Any]:
    """What vLLM answers to one job; a fingerprint that it took is kept in `out`.

    Raises:
        StageProcessError: vLLM did not come up or broke down.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix=".vllm-") as folder:
        work = Path(folder) / "served"
        (result,) = run_vllm([replace(job, out=str(work))], settings, log=log, log_path=log_path)
        if job.reference is not None:
            (work / FINGERPRINT).rename(out / FINGERPRINT)
    return result


def encode_probes(
    scorer: ReferenceScorer, tokenizer: Path, texts: list[str], limit: int
) -> list[list[int]]:
    """Token ids of the texts that are long enough. Raises DataError where none is."""
    tokens = scorer.encode_texts(tokenizer, texts, limit=limit)
    probes = [one for one in tokens if len(one) >= SHORTEST]
    if not probes:
        raise DataError("no text has two tokens: nothing to measure on", hint="smoke.texts=<file>")
    return probes
