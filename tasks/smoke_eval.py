"""smoke_eval: serve the model for real and prove that it is the one that was trained.

The engine that will serve the model (vLLM, or transformers as the fallback) loads the served
folder. Its fingerprint is compared with the live training engine's, its first greedy tokens with
those of transformers; a reward model is compared by its scores. Held-out data says more:

    chat    responses to conversations have to stop and must not loop; exact match before and after
    texts   raw texts are continued
    pairs   how often a reward model scores the chosen answer higher
    probes  nothing more: deliveries have no data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasks.config.sections import Smoke
from tasks.core.contract import Z_95, Check
from tasks.drift.fingerprint import DriftLimit, ScorePrint, score_drift
from tasks.drift.verdict import Moved, print_in, verdict
from tasks.evaluation import checks
from tasks.evaluation.model_folder import computing_dtype_of
from tasks.evaluation.prompts import PromptKind, Setup, Tools, read_pairs, read_question
from tasks.evaluation.responses import Measure, order_of_pairs, read_responses
from tasks.evaluation.scoring import ModelRef
from tasks.evaluation.serve import measure, score_with_vllm
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.serving.reference.rewards import normalised
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.heads import SCORE, normalisation_from
from tasks.weights.quantized.packed import open_model
from tasks.witness.plumbline_witness.prints import FINGERPRINT, SCORES


def smoke_eval(
    out: Path,
    *,
    prompts: PromptKind,
    served: Path,
    reference: Path,  # folder with the trained model's fingerprint or scores
    settings: Smoke,
    profile: DriftLimit,
    tools: Tools,
    log: Log,
    base: Path | None = None,  # the model before training, which gets the same prompts
    data: Path | None = None,  # dataset artifact with `heldout.jsonl`
    reward: Path | None = None,  # reward model that scored the rollouts
    temperature: float | None = None,  # also sample responses, as the rollouts did
    function: Measure | None = None,  # judges the greedy responses of both models
    attn_implementation: str = "sdpa",
    dtype: str | None = None,  # that the engine computes in; None for this machine's
    quantized: bool = False,  # `base` is the same model in 16 bits
    max_eval_drop: float | None = None,  # points of exact match that it may lose
) -> StageReport:
    """Serve a model and compare it with the trained one.

    A folder with stray weight files is not loaded; its report has this one verdict.

    Raises DataError if no held-out row can be used, StageProcessError if the engine did not start
    or crashed, and RewardError if `function` failed.
    """
    strays = checks.stray_weights(served)
    if not strays.ok:
        return StageReport("report", checks=(strays,))
    dtype = dtype or computing_dtype_of(served)
    model = ModelRef(served, dtype=dtype, attn_implementation=attn_implementation)
    setup = Setup(out=out, settings=settings, profile=profile, log=log, **vars(tools))
    if print_in(reference).name == SCORES:
        pairs = []
        if prompts == "pairs":
            assert data is not None
            pairs = read_pairs(served, data, setup)
        report = _reward_model(setup, strays, model, reference, pairs, base)
        return beside_16_bits(report, max_eval_drop) if quantized else report
    question = read_question(
        prompts,
        model,
        None if base is None else replace(model, path=base),
        reference / FINGERPRINT,
        data,
        setup,
        temperature,
    )
    measured = measure(question, setup)
    verdicts = [strays, *measured.checks, *question.checks]
    metrics: dict[str, float] = {}
    if question.base is not None:
        metrics = read_responses(measured, function, reward)
    if question.rows is not None:
        before, after = measured.both()
        if (different := measured.served.rendered_differently) is not None:
            verdicts.append(checks.template_check(different, len(question.rows)))
        verdicts.append(checks.stop_check(after.stopped, settings.min_stop_rate))
        most = settings.max_degenerate_rate
        verdicts.append(checks.degenerate_check(after.tokens, most, before.tokens))
    log.info("smoke_eval: mean KL %.2e in %s", measured.drift.mean_kl, settings.engine)
    report = _report(setup, verdicts, metrics, measured.drift, measured.notes)
    return beside_16_bits(report, max_eval_drop) if quantized else report


def _reward_model(
    setup: Setup,
    strays: Check,
    model: ModelRef,
    reference: Path,
    pairs: Sequence[tuple[list[int], list[int]]],
    base: Path | None,
) -> StageReport:
    """Compare the scores of a reward model with the trained model's, and order held-out pairs."""
    trained = ScorePrint.load(reference / SCORES)
    count, sides = len(trained.probes), [ids for pair in pairs for ids in pair]
    texts = [*map(list, trained.probes), *sides]
    engine = setup.settings.engine
    if engine == "transformers":
        scores = setup.scorer.rewards(model, texts, raw=True)
    else:
        scores = score_with_vllm(model, texts, setup)
    own, name = scores[:count], "drift of the engine's scores from the trained model's"
    if not pairs:  # the reference of a delivery is normalised by the model's files
        config = model.path / "config.json"
        how = normalisation_from(read_json(config), str(config))
        own, name = normalised(own, how), "rewards against those before"
    now = ScorePrint(trained.probes, tuple(own), engine)
    now.save(setup.out / SCORES)
    moved = score_drift(trained, now)
    metrics = {f"reward/{key}": value for key, value in asdict(moved).items()}
    if pairs:
        before: list[float] = []
        if base is not None and SCORE in open_model(base):  # else its head was new: chance
            before = setup.scorer.rewards(replace(model, path=base), sides, raw=True)
        metrics |= order_of_pairs(setup.out, before, scores[count:])
    check = verdict(moved, setup.profile, name=name)
    setup.log.info("smoke_eval: scores move by %.2e of their spread", moved.mean_difference)
    return _report(setup, [strays, check], metrics, moved, {})


def _report(
    setup: Setup,
    verdicts: Sequence[Check],
    metrics: Mapping[str, float],
    moved: Moved,
    causes: Mapping[str, Any],
) -> StageReport:
    """Write `report.json` into `out`, and return the report of the stage."""
    settings = setup.settings
    notes = {"engine": settings.engine, "settings": asdict(settings), **causes}
    document = {
        "engine": settings.engine,
        "checks": [check.as_dict() for check in verdicts],
        "metrics": metrics,
        "notes": notes,
        **asdict(moved),
    }
    write_json(setup.out / "report.json", document)
    return StageReport("report", tuple(verdicts), metrics, notes, moved)


def beside_16_bits(report: StageReport, most: float | None) -> StageReport:
    """Return the report of a quantised model, which had the one in 16 bits in place of the base.

    Its metrics are below `quantized/`: `quantized/eval/before` is the exact match in 16 bits.
    """
    metrics = {f"quantized/{name}": value for name, value in report.metrics.items()}
    verdicts = report.checks
    if most is not None and "eval/error" in report.metrics:
        before, after = (100 * report.metrics[f"eval/{when}"] for when in ("before", "after"))
        error = 100 * Z_95 * report.metrics["eval/error"]
        check = Check(
            "exact match beside 16 bits",
            f">= {before:.1f} % - {most:g} points",
            f"{after:.1f} +- {error:.1f} %",
            ok=round(before - after - error, 6) <= most,
            hint="convert.quantize=none, or convert.max_eval_drop=<points>",
        )
        verdicts = (*verdicts, check)
    return replace(report, checks=verdicts, metrics=metrics)
