"""The checks of smoke tests. Each function turns a measurement into one verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.core.contract import Check, share_interval
from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import TIE_STEPS, Drift, DriftLimit, within
from tasks.drift.verdict import too_far, verdict
from tasks.evaluation.greedy_ties import Agreement
from tasks.serving.text import is_degenerate
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import weight_files

Tokens = Sequence[Sequence[int]]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Files that vLLM loads as weights."""


def stray_weights(served: Path) -> list[str]:
    """Return the names of weight files in the folder that do not belong to the model.

    vLLM finds weight files by glob, so it would load a value head or an adapter into the model.

    Raises:
        ArtifactError: the index has no weight map.
    """
    index = served / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ArtifactError(f"{index}: no weight_map")
        own = set(weight_map.values())
    else:
        own = {SINGLE}
    files = {path.name for path in weight_files(served, *PATTERNS)}
    return sorted(files - own)


def no_strays(strays: Sequence[str]) -> Check:
    """Check that the served folder has no weight files but the model's own."""
    return Check("stray weight files", "none", ", ".join(strays) or "none", ok=not strays)


def drift_check(measured: Drift, limit: DriftLimit, appeared_at: str) -> Check:
    """Check the drift of the engine's fingerprint; a failure names the stage that caused it."""
    name = "drift of the engine from the trained model"
    check = verdict(measured, limit, name=name)
    if check.ok:
        return check
    exceeded = "; ".join(too_far(measured, limit))
    return replace(check, found=f"{exceeded}; drift appeared at: {appeared_at}")


def first_mover(history: Mapping[str, Mapping[str, float]], limit: DriftLimit) -> str | None:
    """Return the first stage whose recorded drift exceeds the limit; None if there is none."""
    for stage, recorded in history.items():
        if within(Drift(**recorded), limit):
            return stage
    return None


def greedy_check(agreement: Agreement, tokens: int) -> Check:
    """Check that the engine's first greedy tokens are those of transformers, for every probe."""
    compared = agreement.equal + agreement.ties + len(agreement.differences)
    text = f"equal on {agreement.equal} of {compared}"
    if agreement.ties:
        text += (
            f", {agreement.ties} part at a tie (within {TIE_STEPS:g} rounding steps or the noise)"
        )
    if agreement.differences:
        text += f", {len(agreement.differences)} differ, first {agreement.differences[0]}"
    return Check(
        f"first {tokens} greedy tokens",
        "transformers' on every probe",
        text,
        ok=compared > 0 and not agreement.differences,
    )


def stop_check(stopped: Sequence[bool], least: float) -> Check:
    """Check that a share `least` of the responses ends before the token limit, within its error.

    The base's share is no measure: before SFT it knows no end of a turn.
    """
    count = sum(stopped)
    return Check(
        "answers that stop",
        f">= {least:.0%}, within the sample's error",
        f"{count} of {len(stopped)}",
        ok=share_interval(count / len(stopped), len(stopped))[1] >= least,
    )


def degenerate_check(tokens: Tokens, most: float, before: Tokens) -> Check:
    """Check that no more responses loop than a share `most`, or than before training."""
    caught = [number for number, response in enumerate(tokens) if is_degenerate(response)]
    allowed = max(most, sum(map(is_degenerate, before)) / len(before))
    text = f"{len(caught)} of {len(tokens)}"
    if caught:
        text += f", first prompt {caught[0]}"
    return Check(
        "answers caught in a loop",
        f"<= {allowed:.0%}, within the sample's error",
        text,
        ok=share_interval(len(caught) / len(tokens), len(tokens))[0] <= allowed,
    )


def template_check(different: int, total: int) -> Check:
    """Check that the engine's tokenizer and chat template render the prompts that we measured."""
    return Check(
        "prompts as the engine renders them",
        "the same token ids",
        f"{different} of {total} differ",
        ok=different == 0,
    )


def probes_check(probes: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> Check:
    """Check that the served tokenizer and chat template render prompts as training did.

    Probes are the first tokens of held-out conversations in training. So each probe starts with a
    rendered prompt, or is the start of one.
    """
    rendered = [tuple(prompt) for prompt in prompts]
    known = sum(any(_share_beginning(tuple(p), r) for r in rendered) for p in probes)
    return Check(
        "prompts as training rendered them",
        "the beginning of every probe",
        f"{known} of {len(probes)}",
        ok=known == len(probes),
    )


def _share_beginning(probe: tuple[int, ...], prompt: tuple[int, ...]) -> bool:
    length = min(len(probe), len(prompt))
    return length > 0 and probe[:length] == prompt[:length]
