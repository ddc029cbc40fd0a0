"""Whether two engines generate the same tokens, ties in bf16 told from differences.

A bf16 logit has 8 bits of precision: at magnitude 16 neighbours lie 0.125 apart, and two engines
that add in another order may differ by one step. Where the two best tokens lie closer than that,
neither choice is wrong. How far two engines really differ grows with the depth of the model; it is
measured on the probes (`engine_noise`), and what lies within it is a tie, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.fingerprint import Fingerprint

TIE_STEPS = 2.0
"""Two logits that differ by less than this many bf16 steps count as tied."""


@dataclass(frozen=True)
class Agreement:
    """Verdicts on every prompt: `equal + ties + len(differences)` prompts were compared.

    Attributes:
        equal: prompts on which all tokens are the same.
        ties: prompts that part at a tie (nothing can be compared after it).
        differences: one line for each prompt that parts elsewhere.
    """

    equal: int
    ties: int
    differences: tuple[str, ...]


def bf16_step(value: float) -> float:
    """Distance of neighbouring bf16 numbers at this magnitude."""
    return 2.0 ** (math.frexp(abs(value))[1] - 8) if value else 2.0**-133


def engine_noise(reference: Fingerprint, served: Fingerprint) -> float:
    """How far two engines differ about the lead of the best token over the second, in nats.

    The largest difference over all positions of the probes. A model that has moved makes it large;
    but such a one fails its drift first.
    """
    rows = np.arange(len(reference.ids))[:, None]
    best = np.argsort(-reference.logprobs, axis=1)[:, :2]
    leads = [np.diff(one.logprobs[rows, best], axis=1) for one in (reference, served)]
    return float(np.abs(leads[0] - leads[1]).max())


def compare_greedy(
    found: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[tuple[int, float]]]],
    noise: float = 0.0,
) -> Agreement:
    """Compare the first tokens of `found` with `expected`, prompt by prompt.

    Args:
        found: tokens of the engine under test; they may go on longer.
        expected: the reference's tokens.
        candidates: the reference's most likely (token, logit) pairs at every step, best first.
        noise: two logits closer than this are a tie (`engine_noise`).
    """
    equal, ties, differences = 0, 0, []
    for number, (have, want, steps) in enumerate(zip(found, expected, candidates, strict=True)):
        at = _first_difference(have, want)
        if at is None:
            equal += 1
        elif at < len(have) and _tied(want[at], have[at], steps[at], noise):
            ties += 1
        else:
            differences.append(
                f"prompt {number}: token {at} is {list(have[at : at + 1])}, expected [{want[at]}]"
            )
    return Agreement(equal, ties, tuple(differences))


def _first_difference(have: Sequence[int], want: Sequence[int]) -> int | None:
    for at, token in enumerate(want):
        if at >= len(have) or have[at] != token:
            return at
    return None


def _tied(best: int, other: int, candidates: Sequence[tuple[int, float]], noise: float) -> bool:
    logits = dict(candidates)
    if best not in logits or other not in logits:
        return False
    apart = abs(logits[best] - logits[other])
    return apart < max(TIE_STEPS * bf16_step(logits[best]), noise)
