"""What a flow's models were measured to be, before and after: for the summary and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.pipeline.stage import StageResult


def evaluation(results: Sequence[StageResult]) -> dict[str, float | None]:
    """Exact match, held-out loss and reward, before and after, from the stages' metrics; of several
    chains from the last one's.
    """
    metrics: dict[str, float] = {}
    for result in results:
        if _link(result) == _link(results[-1]):
            metrics |= result.metrics
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
    return {
        **pairs,
        "before": metrics.get("eval/before"),
        "after": metrics.get("eval/after"),
        "loss_before": metrics.get("heldout_loss_before"),
        "loss_after": metrics.get("heldout_loss_after"),
        **online,
    }


def _distance(metrics: Mapping[str, float]) -> dict[str, float]:
    """From the model before, nats a token: the served model's, else what training estimated."""
    names = [name for name in ("drawn/kl", "kl") if name in metrics]
    return {"kl": metrics[names[0]]} if names else {}


def _link(result: StageResult) -> str:
    """The chain that a stage is of, where there are several."""
    return result.name.rpartition(".")[0]


def evaluation_lines(found: Mapping[str, float | None]) -> list[str]:
    """What `evaluation` gave, as the lines below the summary's table."""
    lines = []
    if (rates := _pair(found, "before", "after")) is not None:
        measure = "pairs in the right order" if "pairs" in found else "exact match"
        points = 100 * (rates[1] - rates[0])
        lines.append(f"{measure} {rates[0]:.1%} -> {rates[1]:.1%} ({points:+.1f} points)")
    if (losses := _pair(found, "loss_before", "loss_after")) is not None:
        lines.append(f"held-out loss {losses[0]:.3f} -> {losses[1]:.3f}")
    if (rewards := _pair(found, "reward_before", "reward_after")) is not None:
        lines.append(f"held-out reward {rewards[0]:.3f} -> {rewards[1]:.3f}")
    if (drawn := _pair(found, "drawn_before", "drawn_after")) is not None:
        lines.append(f"exact match of drawn answers {drawn[0]:.1%} -> {drawn[1]:.1%}")
    if (scored := _pair(found, "scored_before", "scored_after")) is not None:
        lines.append(
            f"reward of drawn answers {scored[0]:.2f} -> {scored[1]:.2f} "
            f"({scored[1] - scored[0]:+.2f} standard deviations)"
        )
    if (kl := found.get("kl")) is not None:
        lines.append(f"distance from the model before {kl:.2f} nats a token")
    return lines


def _pair(found: Mapping[str, float | None], *names: str) -> tuple[float, float] | None:
    """Two of the numbers, where both were measured."""
    before, after = (found.get(name) for name in names)
    return None if before is None or after is None else (before, after)
