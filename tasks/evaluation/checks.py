"""The checks of smoke tests. Each function turns a measurement into one verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tasks.core.contract import Check, share_interval
from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import TIE_STEPS, Drift, DriftLimit, Fingerprint
from tasks.drift.verdict import verdict
from tasks.serving.prompts import is_degenerate
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import weight_files
from tasks.witness.plumbline_witness.prints import rounding_step

Tokens = Sequence[Sequence[int]]
GREEDY_TOKENS = 5
"""First greedy tokens of a served model that have to equal transformers'."""
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Files that vLLM loads as weights."""


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
    tokens: Tokens,
    expected: Tokens,
    candidates: Sequence[Sequence[Sequence[tuple[int, float]]]],
    noise: float = 0.0,
    dtype: str = "bfloat16",
) -> Agreement:
    """Compare the first tokens of each response with the expected ones."""
    equal, ties, differences = 0, 0, []
    for number, (have, want, steps) in enumerate(zip(tokens, expected, candidates, strict=True)):
        have = [*have, *[-1] * len(want)]  # a response that ended early
        at = next((at for at, token in enumerate(want) if have[at] != token), None)
        if at is None:
            equal += 1
        elif _tied(want[at], have[at], dict(steps[at]), noise, dtype):
            ties += 1
        else:
            differences.append(f"prompt {number}: token {at} is {have[at]}, expected {want[at]}")
    return Agreement(equal, ties, tuple(differences))


def _tied(best: int, chosen: int, logits: Mapping[int, float], noise: float, dtype: str) -> bool:
    if best not in logits or chosen not in logits:
        return False
    apart = abs(logits[best] - logits[chosen])
    return apart < max(TIE_STEPS * float(rounding_step(logits[best], dtype)), noise)


def stray_weights(served: Path) -> Check:
    """Check that the served folder has no weight files but the model's own.

    vLLM finds weight files by glob, so it would load a value head or an adapter into the model.
    """
    index, own = served / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ArtifactError(f"{index}: no weight_map")
        own = set(weight_map.values())
    strays = sorted({path.name for path in weight_files(served, *PATTERNS)} - own)
    return Check("stray weight files", "none", ", ".join(strays) or "none", ok=not strays)


def drift_check(measured: Drift, limit: DriftLimit, appeared_at: str) -> Check:
    """Check the drift of the engine's fingerprint; a failure names the stage that caused it."""
    check = verdict(measured, limit, name="drift of the engine from the trained model")
    if check.ok:
        return check
    exceeded = "; ".join(measured.beyond(limit))
    return replace(check, found=f"{exceeded}; drift appeared at: {appeared_at}")


def greedy_check(agreement: Agreement) -> Check:
    """Check that the engine's first greedy tokens are those of transformers, for every probe."""
    compared = agreement.equal + agreement.ties + len(agreement.differences)
    text = f"equal on {agreement.equal} of {compared}"
    if agreement.ties:
        within = f"within {TIE_STEPS:g} rounding steps or the noise"
        text += f", {agreement.ties} part at a tie ({within})"
    if agreement.differences:
        text += f", {len(agreement.differences)} differ, first {agreement.differences[0]}"
    name, expected = f"first {GREEDY_TOKENS} greedy tokens", "transformers' on every probe"
    return Check(name, expected, text, ok=compared > 0 and not agreement.differences)


def stop_check(stopped: Sequence[bool], least: float) -> Check:
    """Check that a share `least` of the responses ends before the token limit, within its error.

    The base's share is no measure: before SFT it knows no end of a turn.
    """
    count, total = sum(stopped), len(stopped)
    expected, counted = f">= {least:.0%}, within the sample's error", f"{count} of {total}"
    ok = share_interval(count / total, total)[1] >= least
    return Check("answers that stop", expected, counted, ok=ok)


def degenerate_check(tokens: Tokens, most: float, before: Tokens) -> Check:
    """Check that no more responses loop than a share `most`, or than before training."""
    caught = [number for number, response in enumerate(tokens) if is_degenerate(response)]
    allowed = max(most, sum(map(is_degenerate, before)) / len(before))
    counted = f"{len(caught)} of {len(tokens)}" + (f", first prompt {caught[0]}" if caught else "")
    ok = share_interval(len(caught) / len(tokens), len(tokens))[0] <= allowed
    expected = f"<= {allowed:.0%}, within the sample's error"
    return Check("answers caught in a loop", expected, counted, ok=ok)


def template_check(different: int, total: int) -> Check:
    """Check that the engine's tokenizer and chat template render the prompts that we measured."""
    name, counted = "prompts as the engine renders them", f"{different} of {total} differ"
    return Check(name, "the same token ids", counted, ok=different == 0)


def probes_check(probes: Tokens, prompts: Tokens) -> Check:
    """Check that the served tokenizer and chat template render prompts as training did.

    Probes are the first tokens of held-out conversations in training. So each probe starts with a
    rendered prompt, or is the start of one.
    """
    pairs = [[(list(probe), list(prompt)) for prompt in prompts if prompt] for probe in probes]
    known = sum(any(probe[: len(p)] == p[: len(probe)] for probe, p in each) for each in pairs)
    name, counted = "prompts as training rendered them", f"{known} of {len(probes)}"
    return Check(name, "the beginning of every probe", counted, ok=known == len(probes))
