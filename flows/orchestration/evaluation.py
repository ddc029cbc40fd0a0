"""Collect the evaluation results of a flow, before and after training, for the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.pipeline.report import StageResult

LM_EVAL = "lm_eval/"
_QUANTIZED = {
    "quantized": "quantized/eval/after",
    "quantized_loss_before": "quantized/loss/before",
    "quantized_loss_after": "quantized/loss/after",
}


def evaluation(results: Sequence[StageResult]) -> dict[str, float | None]:
    """Return exact match, evaluation loss and reward, before and after training.

    Args:
        results: results of all stages; of a run with several steps only the last step counts.
    """
    metrics: dict[str, float] = {}
    for result in results:
        if step_of(result) == step_of(results[-1]):
            metrics |= result.metrics
    own = {
        f"function_{when}": metrics[f"eval/function_{when}"]
        for when in ("before", "after")
        if f"eval/function_{when}" in metrics
    }
    own |= {
        "_".join(key.rsplit("/", 1)): value
        for key, value in metrics.items()
        if key.startswith(LM_EVAL) and key.endswith(("/before", "/after"))
    }
    pairs = {"pairs": metrics["eval/pairs"]} if "eval/pairs" in metrics else {}
    rewards = {
        f"reward_{when}": metrics[f"heldout_reward_{when}"]
        for when in ("before", "after")
        if f"heldout_reward_{when}" in metrics
    }
    scored = {
        f"{name}_{when}": metrics[f"{name}/{when}"]
        for name in ("drawn", "scored")
        for when in ("before", "after")
        if f"{name}/{when}" in metrics
    }
    online = {**rewards, **scored, **_distance(metrics)}
    quantized = {key: metrics[name] for key, name in _QUANTIZED.items() if name in metrics}
    kept: dict[str, float | None] = {
        key: metrics[key] for key in ("kept", "nearest_would_keep") if key in metrics
    }
    return {
        **pairs,
        **kept,
        "before": metrics.get("eval/before"),
        "after": metrics.get("eval/after"),
        "loss_before": metrics.get("heldout_loss_before"),
        "loss_after": metrics.get("heldout_loss_after"),
        **own,
        **online,
        **quantized,
    }


def _distance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the KL divergence from the model before, in nats per token.

    The served model's is preferred to the estimate that training logged.
    """
    names = [name for name in ("drawn/kl", "kl") if name in metrics]
    return {"kl": metrics[names[0]]} if names else {}


def step_of(result: StageResult) -> str:
    """Return the step that a stage belongs to; empty if the run has a single step."""
    return result.name.rpartition(".")[0]


def evaluation_lines(values: Mapping[str, float | None]) -> list[str]:
    """Return the result of `evaluation` as the lines below the summary's table."""
    lines = []
    if (kept := _pair(values, "kept", "nearest_would_keep")) is not None:
        lines.append(
            f"merge: {kept[0]:.1%} of the update kept; to nearest it would be {kept[1]:.1%}"
        )
    if (rates := _pair(values, "before", "after")) is not None:
        measure = "pairs in the right order" if "pairs" in values else "exact match"
        points = 100 * (rates[1] - rates[0])
        lines.append(f"{measure} {rates[0]:.1%} -> {rates[1]:.1%} ({points:+.1f} points)")
    if (exact := _pair(values, "after", "quantized")) is not None:
        points = 100 * (exact[1] - exact[0])
        lines.append(f"quantised: {exact[1]:.1%} beside {exact[0]:.1%} ({points:+.1f} points)")
    if (losses := _pair(values, "quantized_loss_before", "quantized_loss_after")) is not None:
        lines.append(f"quantised: held-out loss {losses[1]:.4f} beside {losses[0]:.4f}")
    if (losses := _pair(values, "loss_before", "loss_after")) is not None:
        lines.append(f"evaluation loss {losses[0]:.3f} -> {losses[1]:.3f}")
    if (own := _pair(values, "function_before", "function_after")) is not None:
        lines.append(f"eval.function {own[0]:.4g} -> {own[1]:.4g}")
    for name in harness_names(values):
        if (scores := _pair(values, f"{name}_before", f"{name}_after")) is not None:
            lines.append(f"{name.replace('/', ' ')} {scores[0]:.4g} -> {scores[1]:.4g}")
    if (rewards := _pair(values, "reward_before", "reward_after")) is not None:
        lines.append(f"evaluation reward {rewards[0]:.3f} -> {rewards[1]:.3f}")
    if (sampled := _pair(values, "drawn_before", "drawn_after")) is not None:
        lines.append(f"sampled exact match {sampled[0]:.1%} -> {sampled[1]:.1%}")
    if (scored := _pair(values, "scored_before", "scored_after")) is not None:
        lines.append(
            f"sampled reward {scored[0]:.2f} -> {scored[1]:.2f} ({scored[1] - scored[0]:+.2f} std)"
        )
    if (kl := values.get("kl")) is not None:
        lines.append(f"KL from the model before {kl:.2f} nats per token")
    return lines


def harness_names(values: Mapping[str, float | None]) -> list[str]:
    """Return the scores of lm-evaluation-harness, `lm_eval/<task>/<metric>`."""
    return [
        k.removesuffix("_after") for k in values if k.startswith(LM_EVAL) and k.endswith("_after")
    ]


def _pair(values: Mapping[str, float | None], *names: str) -> tuple[float, float] | None:
    """Return two of the values; None unless both were measured."""
    before, after = (values.get(name) for name in names)
    return None if before is None or after is None else (before, after)
