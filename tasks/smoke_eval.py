"""smoke_eval: serve the model for real and prove that it is the one that was trained.

The served folder is loaded by the engine that will serve it (vLLM, or transformers as the native
fallback). Its fingerprint is compared with the live training engine's, its first greedy tokens with
transformers', and its answers to held-out prompts are read: do they stop, do they loop, are they
right, and were they before training.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.contract import Check
from tasks.errors import ConfigError, DataError
from tasks.fingerprint import Drift, DriftLimit, Fingerprint, drift, within
from tasks.output import Log
from tasks.report import StageReport
from tasks.scoring import ModelRef, Prompts, ReferenceScorer
from tasks.serve import Question, Served, serve_with_transformers, serve_with_vllm
from tasks.serving import verdicts
from tasks.serving.text import exact_match, is_degenerate
from tasks.serving.ties import Agreement, compare_greedy, engine_noise
from tasks.weights.reader import read_json

ENGINES = ("vllm", "transformers")
ROWS_AT_MOST = 2000
"""Held-out rows rendered when looking for the probes' conversations."""


@dataclass(frozen=True)
class SmokeSettings:
    """What smoke_eval does and what it admits.

    Attributes:
        greedy_tokens: first greedy tokens that have to equal transformers'.
        max_new_tokens: limit of an answer.
        eval_samples: held-out prompts answered (all when there are fewer).
        kv_cache_gib: memory of vLLM's KV cache on CPU, GiB.
        max_model_len: longest sequence; None takes what prompts and probes need.
        timeout_s: for one run of the engine, loading included.
        min_stop_rate: share of answers that must end by themselves.
        max_degenerate_rate: share of answers that may be caught in a loop.
        threads: CPU threads of vLLM; None leaves them to vLLM.
    """

    greedy_tokens: int = 5
    max_new_tokens: int = 64
    eval_samples: int = 200
    kv_cache_gib: int = 1
    max_model_len: int | None = None
    timeout_s: float = 900.0
    min_stop_rate: float = 0.9
    max_degenerate_rate: float = 0.02
    threads: int | None = None


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
        history: drifts that earlier stages recorded, by stage, in the order of the chain.

    Returns:
        Report of kind `report`. A folder with stray weight files is not loaded at all.

    Raises:
        DataError: there is nothing held out.
        StageProcessError: the engine did not come up or broke down.
    """
    if engine not in ENGINES:
        raise ConfigError(f"smoke.engine={engine} is none of {', '.join(ENGINES)}")
    strays = verdicts.stray_weights(served)
    if strays:
        return StageReport("report", checks=(verdicts.no_strays(strays),))
    reference = Fingerprint.load(trained / "fingerprint.fp")
    rows = read_heldout(data / "heldout.jsonl")
    rendered = scorer.encode(served, rows)
    fitting = _fitting(rendered, settings, _context(served))
    asked = fitting[: max(settings.eval_samples, len(reference.probes))]
    question = Question(
        served=served,
        base=base,
        reference=trained / "fingerprint.fp",
        messages=[rows[i]["messages"][:-1] for i in asked],
        prompts=Prompts([rendered.tokens[i] for i in asked], rendered.eos),
        base_prompts=scorer.encode(base, [rows[i] for i in asked], template_from=served),
        dtype=str(read_json(served / "config.json").get("dtype", "bfloat16")),
    )
    answered = _serve(engine, question, settings, out=out, scorer=scorer, log=log,
                      log_path=log_path)  # fmt: skip
    agreement = _compare_greedy(question, answered, settings, scorer, len(reference.probes))
    moved = drift(reference, answered.fingerprint)
    appeared_at = ""
    if within(moved, profile):
        appeared_at = _who_moved(question, profile, scorer, history or {}, engine)
    checks = (
        verdicts.no_strays(strays),
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        verdicts.drift_check(moved, profile, appeared_at),
        verdicts.greedy_check(agreement, settings.greedy_tokens),
        verdicts.probes_check(reference.probes, rendered.tokens),
        verdicts.template_check(answered.rendered_differently, len(asked)),
        verdicts.stop_check(answered.after.stopped, settings.min_stop_rate),
        verdicts.degenerate_check(answered.after.tokens, settings.max_degenerate_rate),
    )
    picked = [rows[i] for i in asked]
    metrics = _read_answers(out, picked, question, answered, scorer)
    metrics |= _numbers(moved, agreement, answered, left_out=len(rows) - len(fitting))
    notes = {
        "engine": engine,
        "settings": asdict(settings),
        "drift_appeared_at": appeared_at or None,
        "greedy_differences": list(agreement.differences[:20]),
    }
    _write_report(out, checks, metrics, notes)
    log.info(
        "smoke_eval: exact match %.3f before, %.3f after, mean KL %.2e, %.0f tokens/s",
        metrics["eval/before"], metrics["eval/after"], moved.mean_kl, metrics["tokens_per_s"],
    )  # fmt: skip
    return StageReport("report", checks, metrics, notes, moved)


def read_heldout(path: Path) -> list[dict[str, Any]]:
    """The held-out conversations, `ROWS_AT_MOST` of them.

    Raises:
        DataError: missing, not JSON, without an answer, or empty.
    """
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(rows) == ROWS_AT_MOST:
                    break
                rows.append(json.loads(line))
                if rows[-1]["messages"][-1]["role"] != "assistant":
                    raise DataError(f"{path}:{number}: the last message is not the assistant's")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}:{number}: not a conversation: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty: nothing to evaluate on", hint="data.eval_fraction=0.05")
    return rows


def _fitting(rendered: Prompts, settings: SmokeSettings, context: int) -> list[int]:
    """Numbers of the rows whose prompt leaves room for a whole answer."""
    longest = min(context, settings.max_model_len or context)
    limit = longest - settings.max_new_tokens
    fitting = [i for i, prompt in enumerate(rendered.tokens) if len(prompt) <= limit]
    if not fitting:
        raise DataError(
            f"no held-out prompt of {len(rendered.tokens)} leaves room for "
            f"{settings.max_new_tokens} new tokens in {longest}",
            hint="smoke.max_new_tokens=... (smaller)",
        )
    return fitting


def _context(served: Path) -> int:
    config = read_json(served / "config.json")
    text = config.get("text_config") or config
    return int(text.get("max_position_embeddings") or 1 << 30)


def _serve(
    engine: str,
    question: Question,
    settings: SmokeSettings,
    *,
    out: Path,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
) -> Served:
    if engine == "transformers":
        return serve_with_transformers(question, settings, out=out, scorer=scorer)
    with tempfile.TemporaryDirectory(dir=out, prefix=".vllm-") as work:
        return serve_with_vllm(
            question, settings, out=out, work=Path(work), log=log, log_path=log_path
        )


def _compare_greedy(
    question: Question,
    answered: Served,
    settings: SmokeSettings,
    scorer: ReferenceScorer,
    probes: int,
) -> Agreement:
    prompts = question.prompts.tokens[:probes]
    expected = scorer.greedy(
        ModelRef(question.served, dtype=question.dtype),
        prompts,
        max_new_tokens=min(settings.greedy_tokens, settings.max_new_tokens),
        eos=question.prompts.eos,
    )
    found = answered.after.tokens[: len(prompts)]
    noise = engine_noise(Fingerprint.load(question.reference), answered.fingerprint)
    return compare_greedy(found, expected.tokens, expected.candidates, noise)


def _who_moved(
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


def _read_answers(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    question: Question,
    answered: Served,
    scorer: ReferenceScorer,
) -> dict[str, float]:
    """Exact match before and after; writes `generations.jsonl`."""
    expected = [row["messages"][-1]["content"] for row in rows]
    after = scorer.decode(question.served, answered.after.tokens)
    before = scorer.decode(question.base, answered.before.tokens)
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {
                "id": row.get("id", str(number)),
                "messages": row["messages"][:-1],
                "expected": expected[number],
                "before": before[number],
                "after": after[number],
                "stopped": answered.after.stopped[number],
                "degenerate": is_degenerate(answered.after.tokens[number]),
                "tokens_before": answered.before.tokens[number],
                "tokens_after": answered.after.tokens[number],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {
        "eval/before": exact_match(before, expected),
        "eval/after": exact_match(after, expected),
        "eval/samples": float(len(rows)),
    }


def _numbers(
    moved: Drift, agreement: Agreement, answered: Served, *, left_out: int
) -> dict[str, float]:
    stopped = answered.after.stopped
    return {
        **{f"drift/{name}": value for name, value in moved.as_dict().items()},
        "greedy/equal": float(agreement.equal),
        "greedy/ties": float(agreement.ties),
        "greedy/differences": float(len(agreement.differences)),
        "stop_rate": sum(stopped) / len(stopped),
        "eval/left_out": float(left_out),
        "tokens_per_s": answered.after.tokens_per_s,
        "engine_load_s": answered.load_s,
    }


def _write_report(
    out: Path, checks: Sequence[Check], metrics: Mapping[str, float], notes: Mapping[str, Any]
) -> None:
    document = {"checks": [asdict(c) for c in checks], "metrics": metrics, "notes": notes}
    (out / "report.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
