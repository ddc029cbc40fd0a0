"""Parts that every kind of smoke test shares: settings, the engine, the comparison, the cause."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.core.contract import Check
from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import DriftLimit, Fingerprint, drift, within
from tasks.evaluation import smoke_checks
from tasks.evaluation.greedy_ties import Agreement, compare_greedy, engine_noise
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.serve import Question, Served, serve_with_transformers, serve_with_vllm
from tasks.process.output import Log

ENGINES = ("vllm", "transformers")


@dataclass(frozen=True)
class SmokeSettings:
    """Settings of a smoke test.

    Attributes:
        greedy_tokens: first greedy tokens that have to equal transformers'.
        max_new_tokens: limit of an answer.
        eval_samples: held-out prompts answered (all when there are fewer).
        kv_cache_gib: memory of vLLM's KV cache on CPU, GiB.
        max_model_len: longest sequence; None takes what prompts and probes need.
        timeout_s: for one run of the engine, loading included; None: by the bytes of the weights.
        min_stop_rate: share of answers that must end by themselves.
        max_degenerate_rate: share of answers that may be caught in a loop.
        threads: CPU threads of vLLM; None leaves them to vLLM.
        tensor_parallel: processes that share the model in vLLM.
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


def before_loading(engine: str, served: Path) -> Check:
    """Check the folder before an engine is started.

    Args:
        engine: "vllm" or "transformers".
        served: the folder to serve; with stray weight files it is not to be loaded at all.

    Raises:
        ConfigError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ConfigError(f"smoke.engine={engine} is none of {', '.join(ENGINES)}")
    return smoke_checks.no_strays(smoke_checks.stray_weights(served))


def ask_engine(
    engine: str,
    question: Question,
    settings: SmokeSettings,
    *,
    out: Path,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
) -> Served:
    """Ask the engine; `out` gets its fingerprint."""
    if engine == "transformers":
        return serve_with_transformers(question, settings, out=out, scorer=scorer)
    with tempfile.TemporaryDirectory(dir=out, prefix=".vllm-") as work:
        return serve_with_vllm(
            question, settings, out=out, work=Path(work), log=log, log_path=log_path
        )


def agree_greedily(
    question: Question,
    answered: Served,
    settings: SmokeSettings,
    scorer: ReferenceScorer,
    probes: int,
) -> Agreement:
    """Compare first greedy tokens with those of transformers, for the first `probes` prompts."""
    prompts = question.prompts.tokens[:probes]
    expected = scorer.greedy(
        ModelRef(question.served, dtype=question.dtype),
        prompts,
        max_new_tokens=min(settings.greedy_tokens, settings.max_new_tokens),
        eos=question.prompts.eos,
    )
    found = answered.after.tokens[: len(prompts)]
    noise = engine_noise(Fingerprint.load(question.reference), answered.fingerprint)
    return compare_greedy(found, expected.tokens, expected.candidates, noise, question.dtype)


def who_moved(
    question: Question,
    profile: DriftLimit,
    scorer: ReferenceScorer,
    history: Mapping[str, Mapping[str, float]],
    engine: str,
) -> str:
    """Name the stage of the chain that changed the model; call it only if one did."""
    stage = smoke_checks.first_mover(history, profile)
    if stage is not None:
        return stage
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        model = ModelRef(question.served, dtype=question.dtype)
        seen = scorer.fingerprint(model, question.reference, Path(folder) / "served.fp")
    if within(drift(Fingerprint.load(question.reference), seen), profile):
        return "the served folder: transformers sees it moved too, so it changed after convert"
    return f"serve: transformers finds the folder unmoved, {engine} computes something else"
