"""Decisions about servers by numbers alone: old versions are refused, new ones never."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.core.errors import TrainingError
from tasks.rl.rollout.sync_proof import NEW_TOKENS, PROBES, Numbers, SyncProof, probe_prompts

URL = "http://127.0.0.1:8000"
SIZE = 6 * PROBES
"""Numbers of responses of six tokens, the same of all servers."""


def measured(
    draw: np.random.Generator, *, step: float, noise: float, share: float, repeat: float = 0.0
) -> tuple[SyncProof, Numbers, Numbers]:
    """Return the proof of the last sync, and trainer's and server's scores of this one.

    Args:
        draw: randomness.
        step: how far the policy moves, nats per token.
        noise: between trainer and server at the same version.
        share: of the step that the server makes.
        repeat: noise between two measurements of the same server.
    """
    before = -np.abs(draw.normal(2, 1, SIZE))
    apart, moved = draw.normal(0, noise, SIZE), draw.normal(0, step, SIZE)
    proof = SyncProof(0.1)
    proof.remember([], before, {URL: before + apart})
    server = before + apart + share * moved + draw.normal(0, repeat, SIZE)
    return proof, before + moved, server


def test_only_servers_with_the_old_version_are_refused() -> None:
    sizes = [(step, noise) for step in (1e-4, 1e-2, 0.05) for noise in (1e-4, 2e-3, 1e-2)]
    for step, noise in sizes:
        for seed in range(20):
            draw, sampled = np.random.default_rng(seed), {"step": step, "noise": noise}
            proof, trainer, server = measured(draw, share=1, repeat=noise / 4, **sampled)
            proof.require_moved(2, trainer, {URL: server})
    for step, noise in ((0.012, 0.002), (0.06, 0.01), (0.03, 0.005)):
        for seed in range(20):
            draw, sampled = np.random.default_rng(seed), {"step": step, "noise": noise}
            proof, trainer, server = measured(draw, share=0, repeat=noise / 4, **sampled)
            with pytest.raises(TrainingError, match=URL):
                proof.require_moved(2, trainer, {URL: server})


def test_a_server_without_any_change_is_refused_below_the_noise() -> None:
    proof, trainer, server = measured(
        np.random.default_rng(0), step=1e-4, noise=1e-2, share=0, repeat=0
    )
    with pytest.raises(TrainingError, match="96 .* 0 "):
        proof.require_moved(2, trainer, {URL: server})


def test_a_few_large_roundings_are_no_old_version() -> None:
    """A confident policy: nearly all tokens keep their numbers, and a few flip by a bit of bf16.

    By least squares over all moves, one in twelve of these would be refused for nothing.
    """
    for seed in range(300):
        draw = np.random.default_rng(seed)
        flips = [draw.standard_t(2, 18) * 1e-3 for _ in range(4)]
        before = -np.abs(draw.standard_t(2, 18))
        proof = SyncProof(0.1)
        proof.remember([], before + flips[0], {URL: before + flips[1]})
        proof.require_moved(2, before + flips[2], {URL: before + flips[3]})


def test_a_policy_that_did_not_move_leaves_nothing_to_prove() -> None:
    proof, trainer, server = measured(np.random.default_rng(0), step=0, noise=2e-3, share=1)
    proof.require_moved(2, trainer, {URL: server})
    few = trainer.copy()
    few[:15] += 0.01  # as rounding flips a few numbers of the trainer and none of the server
    proof.require_moved(2, few, {URL: server})


def test_rounding_moves_that_are_not_the_servers_are_no_old_version() -> None:
    """After a step below rounding, trainer and server flip bits of their own."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        proof, trainer, server = measured(draw, step=4e-3, noise=4e-3, share=0, repeat=4e-3)
        proof.require_moved(2, trainer, {URL: server})


def test_another_model_temperature_or_nan_is_refused() -> None:
    proof, trainer, server = measured(np.random.default_rng(0), step=0, noise=0.5, share=1)
    with pytest.raises(TrainingError, match=r"rl\.mismatch_limit=0\.1"):
        proof.require_moved(1, trainer, {URL: server})
    proof, trainer, server = measured(np.random.default_rng(0), step=0, noise=0, share=1)
    server[3] = np.nan
    with pytest.raises(TrainingError, match="nan"):
        proof.require_moved(1, trainer, {URL: server})
    trainer = np.full(SIZE, -2.0)
    with pytest.raises(TrainingError, match="version 1"):
        SyncProof(0.1).require_sampled(1, {URL: trainer * 1.25}, {URL: trainer})
    near = {URL: trainer + 0.004, "b": trainer - 0.002}
    mismatch = SyncProof(0.1).require_sampled(1, near, dict.fromkeys(near, trainer))
    assert mismatch == pytest.approx(0.003)


def test_probes_fit_into_the_context() -> None:
    for context in (3, 8, 32, 2048):
        prompts = probe_prompts([range(5), range(1000)], context=context)
        assert len(prompts) == PROBES
        response = min(NEW_TOKENS, context - 2)
        assert all(1 <= len(prompt) <= context - response - 1 for prompt in prompts), context
