"""Options of section `rl` that each algorithm uses, and combinations that are invalid.

Imports no torch, so a configuration is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.core.finding import Finding
from tasks.rl.settings import Loop

_DISCOUNT = frozenset({"gamma"})
_CRITIC = frozenset({"gae_lambda", "critic", "critic_lr", "critic_warmup", "value_clip"})
_GROUPS = frozenset({"refill"})
_WHITEN = frozenset({"whiten"})
_KNOWN_TO_SOME = _DISCOUNT | _CRITIC | _GROUPS | _WHITEN

USES: Mapping[str, frozenset[str]] = {
    "ppo": _DISCOUNT | _CRITIC | _WHITEN,
    "grpo": _GROUPS,
    "dr_grpo": _GROUPS,
    "rloo": _GROUPS | _WHITEN,
    "reinforce_pp": _DISCOUNT,
    "reinforce_pp_baseline": _DISCOUNT | _GROUPS,
    "gspo": _GROUPS,
}
"""Options used by only some algorithms, by algorithm. REINFORCE++ always whitens."""
GROUPED = frozenset(name for name, used in USES.items() if used >= _GROUPS)
"""Algorithms that compare responses to the same prompt."""
WITH_CRITIC = frozenset(name for name, used in USES.items() if used >= _CRITIC)
"""Algorithms with a critic."""


def findings(name: str, loop: Loop) -> list[Finding]:
    """Return every problem of section `rl` with this algorithm.

    Args:
        name: the algorithm, `train.objective`.
        loop: section `rl`.

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
    defaults = Loop()
    for option in sorted(_KNOWN_TO_SOME - USES[name]):
        value, default = getattr(loop, option), getattr(defaults, option)
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
            f"rl.num_generations={Loop().num_generations}",
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
