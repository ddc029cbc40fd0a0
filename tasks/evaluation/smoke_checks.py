"""smoke_eval's checks: each takes what was measured and gives one verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import TIE_STEPS, Drift, DriftLimit, within
from tasks.drift.verdict import too_far, verdict
from tasks.evaluation.greedy_ties import Agreement
from tasks.serving.text import is_degenerate
from tasks.weights.files.reader import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def stray_weights(served: Path) -> list[str]:
    """Files that vLLM would stream into the model though they are no part of it.

    vLLM takes weight files by glob, so a value head or an adapter beside the model ends up in it.
    """
    index = served / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ArtifactError(f"{index}: no weight_map")
        own = set(weight_map.values())
    else:
        own = {SINGLE}
    found = {path.name for pattern in PATTERNS for path in served.glob(pattern)}
    return sorted(found - own)


PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def no_strays(strays: Sequence[str]) -> Check:
    """Only the model's own weight files lie in the served folder."""
    return Check("stray weight files", "none", ", ".join(strays) or "none", ok=not strays)


def drift_check(measured: Drift, limit: DriftLimit, appeared_at: str) -> Check:
    """The engine's fingerprint against the trained one; a failure names the stage."""
    name = "drift of the engine from the trained model"
    check = verdict(measured, limit, name=name)
    if check.ok:
        return check
    exceeded = "; ".join(too_far(measured, limit))
    return replace(check, found=f"{exceeded}; drift appeared at: {appeared_at}")


def first_mover(history: Mapping[str, Mapping[str, float]], limit: DriftLimit) -> str | None:
    """The first stage of the chain whose recorded drift exceeds the profile; None if none does."""
    for stage, recorded in history.items():
        if within(Drift(**recorded), limit):
            return stage
    return None


def greedy_check(agreement: Agreement, tokens: int) -> Check:
    """The engine's first greedy tokens against transformers', on every probe."""
    compared = agreement.equal + agreement.ties + len(agreement.differences)
    found = f"equal on {agreement.equal} of {compared}"
    if agreement.ties:
        found += (
            f", {agreement.ties} part at a tie (within {TIE_STEPS:g} rounding steps or the noise)"
        )
    if agreement.differences:
        found += f", {len(agreement.differences)} differ, first {agreement.differences[0]}"
    return Check(
        f"first {tokens} greedy tokens",
        "transformers' on every probe",
        found,
        ok=compared > 0 and not agreement.differences,
    )


def stop_check(stopped: Sequence[bool], least: float) -> Check:
    """Enough answers end by themselves, before the token limit."""
    count = sum(stopped)
    return Check(
        "answers that stop",
        f">= {least:.0%}",
        f"{count} of {len(stopped)}",
        ok=count >= least * len(stopped),
    )


def degenerate_check(tokens: Sequence[Sequence[int]], most: float) -> Check:
    """Hardly any answer is caught in a loop."""
    caught = [number for number, one in enumerate(tokens) if is_degenerate(one)]
    found = f"{len(caught)} of {len(tokens)}"
    if caught:
        found += f", first prompt {caught[0]}"
    return Check(
        "answers caught in a loop", f"<= {most:.0%}", found, ok=len(caught) <= most * len(tokens)
    )


def template_check(different: int, total: int) -> Check:
    """The engine's own tokenizer and chat template give the prompts that were measured."""
    return Check(
        "prompts as the engine renders them",
        "the same token ids",
        f"{different} of {total} differ",
        ok=different == 0,
    )


def probes_check(probes: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> Check:
    """The served tokenizer and chat template render prompts as training did.

    Probes are the first tokens of held-out conversations as training saw them, so each begins
    with one of the rendered prompts, or is the beginning of one.
    """
    rendered = [tuple(prompt) for prompt in prompts]
    known = sum(any(_share_beginning(tuple(p), r) for r in rendered) for p in probes)
    return Check(
        "prompts as training rendered them",
        "the beginning of every probe",
        f"{known} of {len(probes)}",
        ok=known == len(probes),
    )


def _share_beginning(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]
