"""smoke_eval: serve the model for real and prove that it is the one that was trained.

The served folder is loaded by the engine that will serve it (vLLM, or transformers as the native
fallback). Its fingerprint is compared with the live training engine's, its first greedy tokens with
transformers', and its answers to held-out prompts are read: do they stop, do they loop, are they
right (where the data says what is), and were they before training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.contract import Check
from tasks.errors import ConfigError
from tasks.fingerprint import DriftLimit, Fingerprint, drift, within
from tasks.heldout import answerable, context_of, dtype_of, question_of, read_heldout
from tasks.output import Log
from tasks.prints import FINGERPRINT
from tasks.report import StageReport
from tasks.scoring import ModelRef, Prompts, ReferenceScorer
from tasks.serve import Question, Served, serve_with_transformers, serve_with_vllm
from tasks.serving import verdicts
from tasks.serving.ties import Agreement, compare_greedy, engine_noise
from tasks.smoke_answers import describe, numbers, read_answers, write_report
from tasks.smoke_drawn import read_drawn

ENGINES = ("vllm", "transformers")


@dataclass(frozen=True)
class SmokeSettings:
    """What smoke_eval does and what it admits.

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


def smoke_eval(
    out: Path,
    *,
    served: Path,
    base: Path,
    data: Path,
    trained: Path,
    engine: str,
    profile: DriftLimit,
    settings: SmokeSettings,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
    reward: Path | None = None,
    temperature: float | None = None,
    history: Mapping[str, Mapping[str, float]] | None = None,
) -> StageReport:
    """Load, measure, read, judge.

    Args:
        out: staging directory; gets `report.json`, `fingerprint.fp`, `generations.jsonl`.
        served: the folder to serve.
        base: the model before training, for `eval/before`.
        data: dataset artifact with `heldout.jsonl`.
        trained: shards artifact with the training engine's `fingerprint.fp`.
        engine: "vllm" or "transformers".
        profile: the drift it may show.
        settings: the rest.
        scorer: the transformers child.
        log: progress and the engine's output.
        log_path: file for the engine's whole output.
        reward: folder of the reward model that the model learnt from, where there is one.
        temperature: draw answers too, as a policy that learns from its own replies does.
        history: drifts that earlier stages recorded, by stage, in the order of the chain.

    Returns:
        Report of kind `report`. A folder with stray weight files is not loaded at all.

    Raises:
        DataError: there is nothing held out.
        StageProcessError: the engine did not come up or broke down.
    """
    alone = before_loading(engine, served)
    if not alone.ok:
        return StageReport("report", checks=(alone,))
    reference = Fingerprint.load(trained / FINGERPRINT)
    rows = read_heldout(data / "heldout.jsonl")
    rendered = scorer.encode(served, rows)
    context = context_of(served)
    longest = min(context, settings.max_model_len or context)
    asked_of = answerable(rows, rendered, longest=longest, answer=settings.max_new_tokens)
    asked = asked_of[: max(settings.eval_samples, len(reference.probes))]
    question = Question(
        served=served,
        base=base,
        reference=trained / FINGERPRINT,
        messages=[question_of(rows[i]) for i in asked],
        prompts=Prompts([rendered.tokens[i] for i in asked], rendered.eos),
        base_prompts=scorer.encode(base, [rows[i] for i in asked], template_from=served),
        dtype=dtype_of(served),
        temperature=temperature,
    )
    answered = ask_engine(engine, question, settings, out=out, scorer=scorer, log=log,
                      log_path=log_path)  # fmt: skip
    agreement = agree_greedily(question, answered, settings, scorer, len(reference.probes))
    moved = drift(reference, answered.fingerprint)
    appeared_at = ""
    if within(moved, profile):
        appeared_at = who_moved(question, profile, scorer, history or {}, engine)
    checks = (
        alone,
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        verdicts.drift_check(moved, profile, appeared_at),
        verdicts.greedy_check(agreement, settings.greedy_tokens),
        verdicts.probes_check(reference.probes, rendered.tokens),
        verdicts.template_check(answered.rendered_differently, len(asked)),
        verdicts.stop_check(answered.after.stopped, settings.min_stop_rate),
        verdicts.degenerate_check(answered.after.tokens, settings.max_degenerate_rate),
    )
    picked = [rows[i] for i in asked]
    metrics = read_answers(out, picked, question, answered, scorer)
    metrics |= read_drawn(out, picked, question, answered, scorer, reward)
    metrics |= numbers(moved, agreement, answered, left_out=len(rows) - len(asked_of))
    notes = {
        "engine": engine,
        "settings": asdict(settings),
        "drift_appeared_at": appeared_at or None,
        "greedy_differences": list(agreement.differences[:20]),
    }
    write_report(out, checks, metrics, notes)
    log.info(
        "smoke_eval: %smean KL %.2e, %.0f tokens/s",
        describe(metrics), moved.mean_kl, metrics["tokens_per_s"],
    )  # fmt: skip
    return StageReport("report", checks, metrics, notes, moved)


def before_loading(engine: str, served: Path) -> Check:
    """What is looked at before an engine is started.

    Args:
        engine: "vllm" or "transformers".
        served: the folder to serve; with stray weight files it is not to be loaded at all.

    Raises:
        ConfigError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ConfigError(f"smoke.engine={engine} is none of {', '.join(ENGINES)}")
    return verdicts.no_strays(verdicts.stray_weights(served))


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
    """What the engine answers; `out` gets its fingerprint."""
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
    """The engine's first greedy tokens beside transformers', of as many prompts as `probes`."""
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
    """Which step of the chain moved the model; asked only when it did move."""
    stage = verdicts.first_mover(history, profile)
    if stage is not None:
        return stage
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        model = ModelRef(question.served, dtype=question.dtype)
        seen = scorer.fingerprint(model, question.reference, Path(folder) / "served.fp")
    if within(drift(Fingerprint.load(question.reference), seen), profile):
        return "the served folder: transformers sees it moved too, so it changed after convert"
    return f"serve: transformers finds the folder unmoved, {engine} computes something else"
