"""Compare the greedy tokens of two engines; a tie is not a difference.

Where the two best tokens are tied (less than `TIE_STEPS` rounding steps apart, as in
`tasks/drift/fingerprint.py`), neither choice is wrong. How much two engines really differ grows
with the depth of the model. It is measured on the probes (`engine_noise`), and logits closer than
that are tied, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.drift.fingerprint import TIE_STEPS, Fingerprint
from tasks.witness.plumbline_witness.prints import rounding_step


@dataclass(frozen=True)
class Agreement:
    """Verdicts on every prompt: `equal + ties + len(differences)` prompts were compared."""

    equal: int  # prompts on which all tokens are the same
    ties: int  # prompts that part at a tie (nothing can be compared after it)
    differences: tuple[str, ...]  # one line for each prompt that parts elsewhere


def engine_noise(reference: Fingerprint, served: Fingerprint) -> float:
    """Return how much two engines differ in the lead of the best token over the second, in nats.

    The largest difference over all positions of the probes. A model that has moved makes it large,
    but fails its drift check first.
    """
    rows = np.arange(len(reference.ids))[:, None]
    best = np.argsort(-reference.logprobs, axis=1)[:, :2]
    leads = [np.diff(side.logprobs[rows, best], axis=1) for side in (reference, served)]
    return float(np.abs(leads[0] - leads[1]).max())


def compare_greedy(
    tokens: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[tuple[int, float]]]],
    noise: float = 0.0,
    dtype: str = "bfloat16",
) -> Agreement:
    """Compare the first tokens of each response with the expected ones."""
    equal, ties, differences = 0, 0, []
    for number, (have, want, steps) in enumerate(zip(tokens, expected, candidates, strict=True)):
        at = _first_difference(have, want)
        if at is None:
            equal += 1
        elif at < len(have) and _tied(want[at], have[at], steps[at], noise, dtype):
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


def _tied(
    best: int, chosen: int, candidates: Sequence[tuple[int, float]], noise: float, dtype: str
) -> bool:
    logits = dict(candidates)
    if best not in logits or chosen not in logits:
        return False
    apart = abs(logits[best] - logits[chosen])
    return apart < max(TIE_STEPS * float(rounding_step(logits[best], dtype)), noise)
