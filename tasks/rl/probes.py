"""What the policy is fingerprinted on, and what its packed pass is tried on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.rl.experience.responses import Prompt, Scored
from tasks.training.model.probe import PROBE_TOKENS
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.packing import Row, trial_row


def heldout_probes(answered: Sequence[Scored], count: int) -> tuple[tuple[int, ...], ...]:
    """The first `count` held-out prompts with the policy's replies, cut to `PROBE_TOKENS`."""
    whole = [
        np.concatenate([one.reply.prompt.ids, one.reply.generated.ids]) for one in answered[:count]
    ]
    return tuple(tuple(ids[:PROBE_TOKENS].tolist()) for ids in whole)


def trial(prompts: Sequence[Prompt]) -> Row:
    """Two short sequences for `packed_model.require_same`."""
    pieces = [one.ids for one in (prompts[0], prompts[-1])]
    ids = np.concatenate(pieces)
    bounds = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return trial_row(
        Examples(("text",), ("first", "last"), ids, np.ones(len(ids), np.uint8), bounds, {})
    )
