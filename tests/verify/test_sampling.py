"""Default sampling settings: correct servers raise no alarm, and the power of the z-test."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

import numpy as np
import pytest

from tasks.verify.asked import Asked
from tasks.verify.checks.sampling import Settings, sampling
from tests.verify.synthetic import ArrayServer, World, world

SHAPES = [
    # vocabulary, spread of the logits, change by an adapter; 0 for none
    (307, 1.0, 0.0), (800, 2.0, 0.3), (1500, 2.5, 0.3), (3000, 3.0, 0.0), (3000, 4.0, 0.5),
]  # fmt: skip
CLEAN = [Settings(), Settings(0.7), Settings(top_p=0.9), Settings(0.7, top_k=20, top_p=0.8)]
FAULTS = [
    # recorded, served, shapes in which the fault has to be found
    (Settings(), Settings(0.8), 5), (Settings(), Settings(0.7), 5), (Settings(), Settings(1.3), 5),
    (Settings(0.7), Settings(), 5), (Settings(), Settings(top_k=20), 5),
    (Settings(), Settings(top_k=50), 4), (Settings(), Settings(top_p=0.8), 5),
    (Settings(), Settings(top_p=0.9), 2),
]  # fmt: skip


def verdict(made: World, recorded: Settings, served: Settings, seed: int) -> str:
    """Return the verdict about a server with engine noise whose defaults are `served`."""
    logits = made.trained + np.random.default_rng(seed).normal(0, 0.02, made.trained.shape)
    server = ArrayServer(made.probes, {"tuned": logits}, sampling=served, seed=seed)
    reference = made.reference(tokens={"generation_config": asdict(recorded)})
    return sampling(Asked(server, "tuned", None, reference)).verdict


def test_twenty_correct_servers_raise_no_alarm() -> None:
    for seed, ((vocab, spread, moved), settings) in enumerate(product(SHAPES, CLEAN)):
        made = world(seed, vocab=vocab, spread=spread, moved=moved, count=8)
        result = verdict(made, settings, settings, seed)
        assert result == "ok", (vocab, spread, settings)


def test_other_settings_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the power of the test."""
    worlds = [world(7, vocab=v, spread=s, moved=m, count=8) for v, s, m in SHAPES]
    for recorded, served, least in FAULTS:
        alarms = [verdict(made, recorded, served, 11) for made in worlds].count("fault")
        with capsys.disabled():
            print(f"\n{recorded} -> {served}: {alarms} of {len(worlds)}", end="")
        assert alarms >= least, (recorded, served)
