"""The skeleton of a smoke test: serve a model, compare it with the trained one, write the report.

Chat models (`tasks/smoke_eval.py`), raw texts (`smoke_texts`) and reward models (`smoke_rewards`)
share it. Each adds its own prompts and checks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import Drift, DriftLimit, Fingerprint, drift, within
from tasks.drift.verdict import Moved
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import context_of
from tasks.evaluation.greedy_ties import Agreement, compare_greedy, engine_noise
from tasks.evaluation.responses import write_report
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.serve import Question, Served, serve_with_transformers, serve_with_vllm
from tasks.pipeline.report import StageReport
from tasks.process.output import Log

ENGINES = ("vllm", "transformers")


@dataclass(frozen=True)
class SmokeSettings:
    """Settings of a smoke test.

    Attributes:
        greedy_tokens: first greedy tokens that have to equal transformers'.
        max_new_tokens: limit of a response, in tokens.
        eval_samples: number of evaluation prompts (all of them if there are fewer).
        kv_cache_gib: memory of vLLM's KV cache on CPU, GiB.
        max_model_len: longest sequence in tokens; None takes what prompts and probes need.
        timeout_s: time limit of one engine run, loading included; None derives it from the size of
            the weights.
        min_stop_rate: minimum share of responses that end before `max_new_tokens`.
        max_degenerate_rate: maximum share of responses that repeat themselves in a loop.
        threads: CPU threads of vLLM; None leaves the choice to vLLM.
        tensor_parallel: number of processes that share the model in vLLM.
    """

    greedy_tokens: int
    max_new_tokens: int
    eval_samples: int
    kv_cache_gib: int
    max_model_len: int | None
    timeout_s: float | None
    min_stop_rate: float
    max_degenerate_rate: float
    threads: int | None
    tensor_parallel: int


@dataclass(frozen=True)
class Measured:
    """Results of the engine, compared with the trained model.

    Attributes:
        served: fingerprint and responses of the engine.
        drift: distance of its fingerprint from the trained model's.
        agreement: comparison of its first greedy tokens with those of transformers.
        checks: verdicts on loading, drift and greedy tokens.
        notes: what the report says about the cause of a failure.
    """

    served: Served
    drift: Drift
    agreement: Agreement
    checks: tuple[Check, ...]
    notes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SmokeTest:
    """The common arguments of all smoke tests, and the steps that they share.

    Attributes:
        served: folder to serve.
        data: dataset artifact with `heldout.jsonl`.
        trained: shards artifact with the training engine's `fingerprint.fp` or `scores.json`.
        engine: "vllm" or "transformers".
        profile: limits of the drift.
        settings: everything else that the user can set.
        scorer: the transformers child.
        log: gets progress and the engine's output.
        log_path: file for the engine's whole output.
        history: drift recorded by earlier stages, by stage, in the order of the chain.
    """

    served: Path
    data: Path
    trained: Path
    engine: str
    profile: DriftLimit
    settings: SmokeSettings
    scorer: ReferenceScorer
    log: Log
    log_path: Path
    history: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def max_len(self) -> int:
        """Longest sequence that the engine accepts, prompt and response together, in tokens."""
        context = context_of(self.served)
        return min(context, self.settings.max_model_len or context)

    def check_folder(self) -> Check:
        """Check the served folder before an engine is started.

        Returns:
            The verdict on stray weight files. If it fails, the folder must not be loaded.

        Raises:
            ConfigError: unknown engine.
        """
        if self.engine not in ENGINES:
            raise ConfigError(f"smoke.engine={self.engine} is none of {', '.join(ENGINES)}")
        return smoke_checks.no_strays(smoke_checks.stray_weights(self.served))

    def measure(self, question: Question, out: Path) -> Measured:
        """Serve the model, and compare its fingerprint and first greedy tokens.

        Args:
            question: what to serve, and the prompts.
            out: staging directory; gets `fingerprint.fp`.

        Raises:
            StageProcessError: the engine did not start or crashed.
        """
        reference = Fingerprint.load(question.reference)
        served = self._ask_engine(question, out)
        agreement = self._compare_greedy(question, served, len(reference.probes))
        moved = drift(reference, served.fingerprint)
        appeared_at = ""
        if within(moved, self.profile):
            appeared_at = who_moved(question, self.profile, self.scorer, self.history, self.engine)
        checks = (
            smoke_checks.loaded_check(self.engine),
            smoke_checks.drift_check(moved, self.profile, appeared_at),
            smoke_checks.greedy_check(agreement, self.settings.greedy_tokens),
        )
        notes = {
            "drift_appeared_at": appeared_at or None,
            "greedy_differences": list(agreement.differences[:20]),
        }
        return Measured(served, moved, agreement, checks, notes)

    def report(
        self,
        out: Path,
        checks: Sequence[Check],
        metrics: Mapping[str, float],
        moved: Moved,
        causes: Mapping[str, Any] | None = None,
    ) -> StageReport:
        """Write `report.json` into `out`, and return the report of the stage.

        Args:
            out: staging directory.
            checks: all verdicts.
            metrics: all numbers, by name.
            moved: drift of the engine from the trained model.
            causes: `Measured.notes`; None for a reward model, whose file has no notes.
        """
        notes = {"engine": self.engine, "settings": asdict(self.settings), **(causes or {})}
        write_report(out, checks, metrics, None if causes is None else notes)
        return StageReport("report", tuple(checks), metrics, notes, moved)

    def _ask_engine(self, question: Question, out: Path) -> Served:
        if self.engine == "transformers":
            return serve_with_transformers(question, self.settings, out=out, scorer=self.scorer)
        with tempfile.TemporaryDirectory(dir=out, prefix=".vllm-") as work:
            return serve_with_vllm(
                question,
                self.settings,
                out=out,
                work=Path(work),
                log=self.log,
                log_path=self.log_path,
            )

    def _compare_greedy(self, question: Question, served: Served, probes: int) -> Agreement:
        """Compare greedy tokens with those of transformers, for the first `probes` prompts."""
        prompts = question.prompts.tokens[:probes]
        expected = self.scorer.greedy(
            ModelRef(question.served, dtype=question.dtype),
            prompts,
            max_new_tokens=min(self.settings.greedy_tokens, self.settings.max_new_tokens),
            eos=question.prompts.eos,
        )
        tokens = served.after.tokens[: len(prompts)]
        noise = engine_noise(Fingerprint.load(question.reference), served.fingerprint)
        return compare_greedy(tokens, expected.tokens, expected.candidates, noise, question.dtype)


def who_moved(
    question: Question,
    profile: DriftLimit,
    scorer: ReferenceScorer,
    history: Mapping[str, Mapping[str, float]],
    engine: str,
) -> str:
    """Name the stage of the chain that changed the model; call it only after a failed drift check.

    Args:
        question: the served folder and the trained fingerprint.
        profile: limits of the drift.
        scorer: the transformers child.
        history: drift recorded by earlier stages, by stage, in the order of the chain.
        engine: name of the engine that served the model.
    """
    stage = smoke_checks.first_mover(history, profile)
    if stage is not None:
        return stage
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        model = ModelRef(question.served, dtype=question.dtype)
        seen = scorer.fingerprint(model, question.reference, Path(folder) / "served.fp")
    if within(drift(Fingerprint.load(question.reference), seen), profile):
        return "the served folder: transformers sees it moved too, so it changed after convert"
    return f"serve: transformers finds the folder unmoved, {engine} computes something else"
