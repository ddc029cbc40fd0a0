"""Settings of the engine in a delivery's smoke test, and the probes to measure on."""

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
"""Minimum number of tokens of a probe: one as context and one to score."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine; `tasks/config/deliver_flow.py` describes them."""

    greedy_tokens: int = 5
    kv_cache_gib: int = 1
    max_model_len: int | None = None
    timeout_s: float | None = None
    threads: int | None = None

    def longest(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return the length of the longest sequence, prompt and new tokens together."""
        need = max(len(prompt) for prompt in prompts) + self.greedy_tokens
        return self.max_model_len or need + HEADROOM


def ask_vllm(
    job: Job, settings: EngineSettings, *, out: Path, log: Any, log_path: Path
) -> dict[str, Any]:
    """Run one job in vLLM, and return its result.

    Args:
        job: the job; its field `out` is replaced.
        settings: settings of the engine.
        out: folder that gets `fingerprint.fp`, if the job takes a fingerprint.
        log: gets the engine's output.
        log_path: file for the engine's whole output.

    Raises:
        StageProcessError: vLLM did not start or crashed.
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
    """Return the token ids of the texts with at least `SHORTEST` tokens.

    Args:
        scorer: the transformers child.
        tokenizer: folder of the tokenizer.
        texts: plain texts.
        limit: maximum number of tokens of a probe.

    Raises:
        DataError: all texts are too short.
    """
    tokens = scorer.encode_texts(tokenizer, texts, limit=limit)
    probes = [ids for ids in tokens if len(ids) >= SHORTEST]
    if not probes:
        raise DataError("no text has two tokens: nothing to measure on", hint="smoke.texts=<file>")
    return probes
