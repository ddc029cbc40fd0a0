"""Algorithms without their formulas: parts, options of section `rl`, invalid combinations.

Imports no torch, so a configuration is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from tasks.config.defaults import ALGORITHMS
from tasks.core.finding import Finding
from tasks.rl.settings import Loop

_DISCOUNT = frozenset({"gamma"})
_CRITIC = frozenset({"gae_lambda", "critic", "critic_lr", "critic_warmup", "value_clip"})
_GROUPS = frozenset({"refill", "mask_truncated"})
_WHITEN = frozenset({"whiten"})
_KNOWN_TO_SOME = _DISCOUNT | _CRITIC | _GROUPS | _WHITEN


class Terms(NamedTuple):
    """Fixed parts of an algorithm, and the options that only some algorithms use.

    Attributes:
        advantages: of each token, in words.
        uses: options of section `rl`. REINFORCE++ always whitens.
        aggregate: kind of mean in the loss, see `PolicyLoss`.
        ratio: of the loss: `token` or `sequence`.
    """

    advantages: str
    uses: frozenset[str]
    aggregate: str = "tokens"
    ratio: str = "token"


_NORMALISED = "score minus its group's mean, over its deviation"
TERMS: Mapping[str, Terms] = {
    "ppo": Terms("GAE", _DISCOUNT | _CRITIC | _WHITEN),
    "grpo": Terms(_NORMALISED, _GROUPS, "sequences"),
    "dapo": Terms(_NORMALISED, _GROUPS),
    "dr_grpo": Terms("score minus its group's mean", _GROUPS, "constant"),
    "rloo": Terms("score minus the mean of its group's others", _GROUPS | _WHITEN),
    "reinforce_pp": Terms("return, normalised over the iteration", _DISCOUNT),
    "reinforce_pp_baseline": Terms(
        "return minus its group's mean, normalised over the iteration", _DISCOUNT | _GROUPS
    ),
    "gspo": Terms(_NORMALISED, _GROUPS, "sequences", "sequence"),
}
GROUPED = frozenset(name for name, terms in TERMS.items() if terms.uses >= _GROUPS)
"""Algorithms that compare responses to the same prompt."""
WITH_CRITIC = frozenset(name for name, terms in TERMS.items() if terms.uses >= _CRITIC)
"""Algorithms with a critic."""
_MEANS = {
    "tokens": "over all tokens",
    "sequences": "over the responses' means",
    "constant": "over responses x rollout.max_new_tokens",
}


def described(name: str, loop: Loop) -> list[str]:
    """Return lines about the loss that a run minimises: clip, KL, advantages, mean."""
    terms = TERMS[name]
    kl = "none"
    if loop.kl_coef:
        kl = f"{loop.kl_coef:g} x {loop.kl_estimator} in the {loop.kl_in}"
    whitened = ", whitened" if loop.whiten else ""
    masked = ", truncated responses left out" if loop.mask_truncated else ""
    return [
        f"clip: {loop.clip_low:g} below 1, {loop.clip_high:g} above, ratio of each {terms.ratio}",
        f"KL: {kl}",
        f"advantages: {terms.advantages}{whitened}; "
        f"{loop.rollout_batch_size} prompts x {loop.num_generations} responses",
        f"mean: {_MEANS[terms.aggregate]}{masked}",
    ]


def findings(name: str, loop: Loop) -> list[Finding]:
    """Return every problem of section `rl` with this algorithm.

    Raises:
        KeyError: no such algorithm.
    """
    return [
        *_unused(name, loop),
        *_too_small_groups(name, loop),
        *_contradictions(loop),
    ]


def _unused(name: str, loop: Loop) -> Iterator[Finding]:
    """Options that were changed but have no effect."""
    usual = {**{setting.name: setting.default for setting in fields(Loop)}, **ALGORITHMS[name]}
    for option in sorted(_KNOWN_TO_SOME - TERMS[name].uses):
        value, default = getattr(loop, option), usual[option]
        if value != default:
            reason = f"train.objective={name} does not use it"
            yield Finding(f"rl.{option}", _shown(value), reason, f"rl.{option}={_shown(default)}")


def _too_small_groups(name: str, loop: Loop) -> Iterator[Finding]:
    if name in GROUPED and loop.num_generations < 2:
        reason = f"train.objective={name} compares the responses to a prompt: at least 2"
        yield Finding(
            "rl.num_generations",
            str(loop.num_generations),
            reason,
            f"rl.num_generations={ALGORITHMS[name]['num_generations']}",
        )


def _contradictions(loop: Loop) -> Iterator[Finding]:
    """Numbers that contradict each other."""
    if loop.dual_clip is not None and loop.dual_clip <= 1 + loop.clip_high:
        reason = f"has to be above 1 + rl.clip_high={loop.clip_high:g}"
        hint = f"rl.dual_clip={3 + loop.clip_high:g}"
        yield Finding("rl.dual_clip", f"{loop.dual_clip:g}", reason, hint)
    if loop.kl_target is not None and loop.kl_coef <= 0:
        reason = f"rl.kl_coef={loop.kl_coef:g} is scaled to reach it and has to be above 0"
        yield Finding("rl.kl_target", f"{loop.kl_target:g}", reason, "rl.kl_coef=0.05")
    if (loop.overlong_buffer == 0) != (loop.overlong_penalty == 0):
        value = f"{loop.overlong_buffer} with rl.overlong_penalty={loop.overlong_penalty:g}"
        hint = "rl.overlong_buffer=16 rl.overlong_penalty=1"
        reason = "neither has an effect without the other"
        yield Finding("rl.overlong_buffer", value, reason, hint)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
