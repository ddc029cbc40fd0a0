"""Algorithms of online RL by name: one line each in `ALGORITHMS`, and which options they use.

Their defaults stand in `tasks/config/defaults.py` and are applied when a configuration is composed.
Imports no torch, so a configuration is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.core.errors import Finding
from tasks.rl.settings import Loop


class Algorithm(NamedTuple):
    """One algorithm."""

    estimate: str  # name of the estimator in `advantages.estimate`
    described: str  # the advantage of each token, in words
    # kind of mean in the loss: `tokens`, `sequences` or `constant`, see `losses.py`
    aggregate: str = "tokens"
    # of new to old probability: of each `token`, or of the `sequence`, for all its tokens
    ratio: str = "token"
    critic: bool = False
    groups: bool = True  # responses to the same prompt are compared


_NORMALISED = "score minus its group's mean, over its deviation"
_OF_ITERATION = "normalised over the iteration"
ALGORITHMS: Mapping[str, Algorithm] = {
    # arXiv:1707.06347
    "ppo": Algorithm("gae", "GAE", critic=True, groups=False),
    # arXiv:2402.03300
    "grpo": Algorithm("group_normalized", _NORMALISED, "sequences"),
    # arXiv:2503.14476
    "dapo": Algorithm("group_normalized", _NORMALISED),
    # arXiv:2503.20783
    "dr_grpo": Algorithm("group_centered", "score minus its group's mean", "constant"),
    # arXiv:2402.14740
    "rloo": Algorithm("leave_one_out", "score minus the mean of its group's others"),
    # arXiv:2501.03262, both
    "reinforce_pp": Algorithm("returns", f"return, {_OF_ITERATION}", groups=False),
    "reinforce_pp_baseline": Algorithm(
        "centered_returns", f"return minus its group's mean, {_OF_ITERATION}"
    ),
    # arXiv:2507.18071
    "gspo": Algorithm("group_normalized", _NORMALISED, "sequences", "sequence"),
}
_MEANS = {
    "tokens": "over all tokens",
    "sequences": "over the responses' means",
    "constant": "over responses x rollout.max_new_tokens",
}


def described(name: str, loop: Loop) -> list[str]:
    """Return lines about the loss that a run minimises: clip, KL, advantages, mean."""
    chosen = ALGORITHMS[name]
    kl = "none"
    if loop.kl_coef:
        kl = f"{loop.kl_coef:g} x {loop.kl_estimator} in the {loop.kl_in}"
    whitened = ", whitened" if loop.whiten else ""
    masked = ", truncated responses left out" if loop.mask_truncated else ""
    return [
        f"clip: {loop.clip_low:g} below 1, {loop.clip_high:g} above, ratio of each {chosen.ratio}",
        f"KL: {kl}",
        f"advantages: {chosen.described}{whitened}; "
        f"{loop.rollout_batch_size} prompts x {loop.num_generations} responses",
        f"mean: {_MEANS[chosen.aggregate]}{masked}",
    ]


def findings(name: str, loop: Loop) -> Iterator[Finding]:
    """Yield every problem of section `rl` with this algorithm."""
    if ALGORITHMS[name].groups and loop.num_generations < 2:
        reason = f"train.objective={name} compares the responses to a prompt: at least 2"
        hint = f"rl.num_generations={DEFAULTS[name]['num_generations']}"
        yield Finding("rl.num_generations", str(loop.num_generations), reason, hint)
    if loop.dual_clip is not None and loop.dual_clip <= 1 + loop.clip_high:
        reason = f"has to be above 1 + rl.clip_high={loop.clip_high:g}"
        hint = f"rl.dual_clip={3 + loop.clip_high:g}"
        yield Finding("rl.dual_clip", f"{loop.dual_clip:g}", reason, hint)
