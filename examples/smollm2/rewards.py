"""Measures of an answer about a country, for `reward.function` and `eval.function`."""

from __future__ import annotations

import json


def valid_json(completions, **_):
    """Return 1 for an answer that is a JSON object of a capital and a continent, else 0."""
    return [float(_facts(completion) is not None) for completion in completions]


def right_capital(completions, answer, **_):
    """Return 1 for the right capital in valid JSON, 0.2 for valid JSON alone, else 0."""
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        facts = _facts(completion)
        right = facts is not None and facts["capital"] == json.loads(expected)["capital"]
        scores.append(1.0 if right else 0.2 * (facts is not None))
    return scores


def _facts(completion):
    try:
        facts = json.loads(completion[0]["content"])
    except json.JSONDecodeError:
        return None
    known = isinstance(facts, dict) and facts.keys() == {"capital", "continent"}
    return facts if known else None
