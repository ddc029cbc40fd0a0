"""Collect the evaluation results of a flow, before and after training, for the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tasks.pipeline.report import StageResult

LM_EVAL = "lm_eval/"
_METRICS = {
    "before": "eval/before",
    "after": "eval/after",
    "loss_before": "heldout_loss_before",
    "loss_after": "heldout_loss_after",
    "pairs": "eval/pairs",
    "kept": "kept",
    "nearest_would_keep": "nearest_would_keep",
    "function_before": "eval/function_before",
    "function_after": "eval/function_after",
    "reward_before": "heldout_reward_before",
    "reward_after": "heldout_reward_after",
    "drawn_before": "drawn/before",
    "drawn_after": "drawn/after",
    "scored_before": "scored/before",
    "scored_after": "scored/after",
    "quantized": "quantized/eval/after",
    "quantized_loss_before": "quantized/loss/before",
    "quantized_loss_after": "quantized/loss/after",
}
"""Metrics by the name of a value in the summary."""
_ALWAYS = ("before", "after", "loss_before", "loss_after")
"""Values that are null if they were not measured; others are left out."""

_LINES = (
    ("kept", "nearest_would_keep",
     "merge: {0:.1%} of the update kept; to nearest it would be {1:.1%}"),
    ("before", "after", "{measure} {0:.1%} -> {1:.1%} ({points:+.1f} points)"),
    ("after", "quantized", "quantised: {1:.1%} beside {0:.1%} ({points:+.1f} points)"),
    ("quantized_loss_before", "quantized_loss_after",
     "quantised: held-out loss {1:.4f} beside {0:.4f}"),
    ("loss_before", "loss_after", "evaluation loss {0:.3f} -> {1:.3f}"),
    ("function_before", "function_after", "eval.function {0:.4g} -> {1:.4g}"),
    ("reward_before", "reward_after", "evaluation reward {0:.3f} -> {1:.3f}"),
    ("drawn_before", "drawn_after", "sampled exact match {0:.1%} -> {1:.1%}"),
    ("scored_before", "scored_after", "sampled reward {0:.2f} -> {1:.2f} ({change:+.2f} std)"),
)  # fmt: skip
"""Lines of the summary about two values each."""


def evaluation(results: Sequence[StageResult]) -> dict[str, float | None]:
    """Return what was measured before and after training by name, of the last step of a run."""
    metrics: dict[str, float] = {}
    for result in results:
        if step_of(result) == step_of(results[-1]):
            metrics |= result.metrics
    values: dict[str, float | None] = {
        key: metrics.get(name)
        for key, name in _METRICS.items()
        if name in metrics or key in _ALWAYS
    }
    for name, value in metrics.items():
        if name.startswith(LM_EVAL) and name.endswith(("/before", "/after")):
            values["_".join(name.rsplit("/", 1))] = value
    # KL from the model before: the served model's, else the estimate that training logged.
    kl = metrics.get("drawn/kl", metrics.get("kl"))
    return values if kl is None else {**values, "kl": kl}


def step_of(result: StageResult) -> str:
    """Return the step that a stage belongs to; empty if the run has a single step."""
    return result.name.rpartition(".")[0]


def evaluation_lines(values: Mapping[str, float | None]) -> Iterator[str]:
    """Yield the result of `evaluation` as the lines below the summary's table."""
    measure = "pairs in the right order" if "pairs" in values else "exact match"
    harness = (
        (f"{name}_before", f"{name}_after", f"{name.replace('/', ' ')} {{0:.4g}} -> {{1:.4g}}")
        for name in harness_names(values)
    )
    for first, second, line in (*_LINES, *harness):
        a, b = values.get(first), values.get(second)
        if a is not None and b is not None:
            yield line.format(a, b, measure=measure, change=b - a, points=100 * (b - a))
    if (kl := values.get("kl")) is not None:
        yield f"KL from the model before {kl:.2f} nats per token"


def harness_names(values: Mapping[str, float | None]) -> list[str]:
    """Return the scores of lm-evaluation-harness, `lm_eval/<task>/<metric>`."""
    names = [key for key in values if key.startswith(LM_EVAL) and key.endswith("_after")]
    return [name.removesuffix("_after") for name in names]
