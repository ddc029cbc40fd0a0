"""Which knobs of section `rl` an algorithm knows, and what may not be asked together.

Knows no torch, so that a configuration is refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tasks.rl.settings import Loop

KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "tis", "icepop", "sequence_mask")

_DISCOUNT = frozenset({"gamma"})
_CRITIC = frozenset({"lam", "critic", "critic_lr", "critic_warmup", "value_clip"})
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
"""By algorithm: what it knows of the knobs that not all know. (REINFORCE++ whitens in any case.)"""
GROUPED = frozenset(name for name, used in USES.items() if used >= _GROUPS)
"""Algorithms that compare replies to the same prompt."""
WITH_CRITIC = frozenset(name for name, used in USES.items() if used >= _CRITIC)
"""Algorithms that have a critic."""

_CHOICES = {
    "kl_in": ("reward", "loss"),
    "kl_estimator": KL_ESTIMATORS,
    "critic": ("shared", "separate"),
    "correction": CORRECTIONS,
}


class Finding(NamedTuple):
    """One problem: the key, its value, what is allowed, what to type. As the preflight's."""

    what: str
    found: str
    allowed: str
    override: str

    def __str__(self) -> str:
        return f"{self.what}={self.found}: {self.allowed}"


def findings(name: str, loop: Loop) -> list[Finding]:
    """Everything about section `rl` that does not fit the algorithm of that name.

    Raises:
        KeyError: there is no such algorithm.
    """
    return [
        *_unused(name, loop),
        *_no_choice(loop),
        *_too_small_groups(name, loop),
        *_at_odds(loop),
    ]


def _unused(name: str, loop: Loop) -> Iterator[Finding]:
    """Knobs that were changed to no effect."""
    usual = Loop()
    for knob in sorted(_KNOWN_TO_SOME - USES[name]):
        asked, default = getattr(loop, knob), getattr(usual, knob)
        if asked != default:
            allowed = f"train.objective={name} does not use it"
            yield Finding(f"rl.{knob}", _shown(asked), allowed, f"rl.{knob}={_shown(default)}")


def _no_choice(loop: Loop) -> Iterator[Finding]:
    """Words that are none of those there are."""
    for knob, known in _CHOICES.items():
        asked = getattr(loop, knob)
        if asked not in known:
            yield Finding(
                f"rl.{knob}", asked, f"one of {', '.join(known)}", f"rl.{knob}={known[0]}"
            )


def _too_small_groups(name: str, loop: Loop) -> Iterator[Finding]:
    if name in GROUPED and loop.samples < 2:
        allowed = f"train.objective={name} compares the replies to a prompt, at least two"
        yield Finding("rl.samples", str(loop.samples), allowed, f"rl.samples={Loop().samples}")


def _at_odds(loop: Loop) -> Iterator[Finding]:
    """Numbers that go together, and do not."""
    if loop.dual_clip is not None and loop.dual_clip <= 1 + loop.clip_high:
        allowed = f"above 1 + rl.clip_high={loop.clip_high:g}: it bounds what the clip lets pass"
        override = f"rl.dual_clip={3 + loop.clip_high:g}"
        yield Finding("rl.dual_clip", f"{loop.dual_clip:g}", allowed, override)
    if loop.kl_target is not None and loop.kl_coef <= 0:
        allowed = f"rl.kl_coef={loop.kl_coef:g} is multiplied to reach it, and has to be above 0"
        yield Finding("rl.kl_target", f"{loop.kl_target:g}", allowed, "rl.kl_coef=0.05")
    if (loop.overlong_buffer == 0) != (loop.overlong_penalty == 0):
        found = f"{loop.overlong_buffer} with rl.overlong_penalty={loop.overlong_penalty:g}"
        override = "rl.overlong_buffer=16 rl.overlong_penalty=1"
        allowed = "neither has an effect without the other"
        yield Finding("rl.overlong_buffer", found, allowed, override)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
