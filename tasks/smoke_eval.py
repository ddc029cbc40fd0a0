"""smoke_eval: serve the model for real and prove that it is the one that was trained.

The engine that will serve the model (vLLM, or transformers as the fallback) loads the served
folder. Its fingerprint is compared with the live training engine's, its first greedy tokens with
those of transformers. Its responses to evaluation prompts have to stop and must not loop. Where the
data has answers, exact match is measured before and after training.
"""

from __future__ import annotations

from pathlib import Path

from tasks.drift.fingerprint import Fingerprint
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import answerable, read_heldout
from tasks.evaluation.responses import Measure, describe, judge_of, numbers, read_answers
from tasks.evaluation.sampled_responses import read_sampled
from tasks.evaluation.scoring import Prompts
from tasks.evaluation.serve import Question
from tasks.evaluation.smoke import SmokeTest, smoke_test
from tasks.pipeline.report import StageReport
from tasks.serving.prompts import question_of


@smoke_test
def smoke_eval(
    test: SmokeTest,
    out: Path,
    *,
    base: Path,
    data: Path,
    reward: Path | None = None,
    temperature: float | None = None,
    function: Measure | None = None,
    function_s: float = 0.0,
) -> StageReport:
    """Serve a chat model and compare it with the trained one.

    Args:
        test: the common arguments.
        out: staging directory; gets `report.json`, `fingerprint.fp`, `generations.jsonl`.
        base: the model before training, for `eval/before`.
        data: dataset artifact with `heldout.jsonl`.
        reward: folder of the reward model that scored the rollouts, if there is one.
        temperature: also sample responses at this temperature, that of the rollouts.
        function: the user's `eval.function`, which judges the greedy responses of both models.
        function_s: seconds for a call of it.

    Returns:
        Report of kind `report`.

    Raises:
        DataError: there are no evaluation prompts.
        StageProcessError: the engine did not start or crashed.
        RewardError: `function` raised, hung, or did not return a finite number for each response.
    """
    settings, scorer = test.settings, test.scorer
    reference = Fingerprint.load(test.trained / FINGERPRINT)
    rows = read_heldout(data / "heldout.jsonl")
    rendered = scorer.encode(test.served, rows)
    usable = answerable(rows, rendered, longest=test.max_len, answer=settings.max_new_tokens)
    chosen = usable[: max(settings.eval_samples, len(reference.probes))]
    prompted = [rows[i] for i in chosen]
    question = Question(
        served=test.served,
        base=base,
        reference=test.trained / FINGERPRINT,
        chats=[question_of(row) for row in prompted],
        prompts=Prompts([rendered.tokens[i] for i in chosen], rendered.eos),
        base_prompts=scorer.encode(base, prompted, template_from=test.served),
        dtype=test.model.dtype,
        attn_implementation=test.attn_implementation,
        temperature=temperature,
    )
    measured = test.measure(question, out)
    served, (old, new) = measured.served, measured.both()
    checks = (
        *measured.checks,
        smoke_checks.probes_check(reference.probes, rendered.tokens),
        smoke_checks.template_check(served.rendered_differently, len(prompted)),
        smoke_checks.stop_check(new.stopped, settings.min_stop_rate),
        smoke_checks.degenerate_check(new.tokens, settings.max_degenerate_rate, old.tokens),
    )
    left_out = len(rows) - len(usable)
    judge = None
    if function is not None:
        judge = judge_of(function, function_s, test.log, test.log_path.with_name("eval.log"))
    metrics = read_answers(out, prompted, measured, scorer, judge)
    metrics |= read_sampled(out, prompted, measured, scorer, reward)
    metrics |= numbers(measured, left_out=left_out)
    report = test.report(out, checks, metrics, measured.drift, measured.notes)
    test.log.info(
        "smoke_eval: %smean KL %.2e, %.0f tokens/s",
        describe(metrics), measured.drift.mean_kl, metrics["tokens_per_s"],
    )  # fmt: skip
    return report
