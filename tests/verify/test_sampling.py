"""Default sampling settings: correct servers raise no alarm, and the power of the z-test."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.verify.compare import Asked
from tasks.verify.run import run_checks
from tasks.verify.sampling import Settings, sampling
from tasks.verify.server import Generated, ServerError
from tests.verify.synthetic import ArrayServer, World, noisy, world

SHAPES = [  # vocabulary, spread of the logits, change by an adapter; 0 for none
    (307, 1.0, 0.0), (1500, 2.5, 0.3), (3000, 4.0, 0.5),
]  # fmt: skip
CLEAN = [Settings(), Settings(0.7), Settings(top_p=0.9), Settings(0.7, top_k=20, top_p=0.8)]
FAULTS = [
    # recorded, served, shapes in which the fault has to be found
    (Settings(), Settings(0.8), 3), (Settings(), Settings(1.3), 3), (Settings(), Settings(0.0), 3),
    (Settings(0.7), Settings(), 3), (Settings(), Settings(top_k=20), 3),
    (Settings(), Settings(top_k=50), 2), (Settings(), Settings(top_p=0.8), 3),
    (Settings(), Settings(top_p=0.9), 1), (Settings(), Settings(min_p=0.1), 3),
]  # fmt: skip


def verdict(made: World, recorded: Settings, served: Settings, seed: int) -> str:
    """Return the verdict about a server with engine noise whose defaults are `served`."""
    models = {"tuned": noisy(made.trained, seed)}
    server = ArrayServer(made.probes, models, sampling=served, seed=seed)
    reference = made.reference(tokens={"generation_config": asdict(recorded)})
    return sampling(Asked(server, "tuned", None, reference)).verdict


def test_correct_servers_raise_no_alarm() -> None:
    for seed, ((vocab, spread, moved), settings) in enumerate(product(SHAPES, CLEAN)):
        made = world(seed, vocab=vocab, spread=spread, moved=moved, count=8)
        result = verdict(made, settings, settings, seed)
        assert result == "ok", (vocab, spread, settings)


def test_other_settings_are_found() -> None:
    worlds = [world(7, vocab=v, spread=s, moved=m, count=8) for v, s, m in SHAPES]
    for recorded, served, least in FAULTS:
        alarms = [verdict(made, recorded, served, 11) for made in worlds].count("fault")
        assert alarms >= least, (recorded, served)


@pytest.mark.parametrize(("first", "verdict"), [(0.0, "unknown"), (8.0, "ok")])
def test_a_flat_distribution_raises_no_alarm(first: float, verdict: str) -> None:
    for seed in range(4):
        made = world(seed, vocab=307, spread=0.05, moved=0.0)
        made.trained[:, 0] += first
        server = ArrayServer(made.probes, {"tuned": noisy(made.trained, seed)}, seed=seed)
        check = sampling(Asked(server, "tuned", None, made.reference()))
        assert check.verdict == verdict, check


def test_a_slow_server_gets_fewer_requests_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(10, spread=2.0)
    clock = [0.0]
    module = sys.modules[sampling.__module__]  # the package exports the function by this name
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class SlowServer(ArrayServer):
        def generate(self, *args: Any, **kwargs: Any) -> list[Generated]:
            clock[0] += 5.0  # 16 tokens at 3 tokens/s
            if clock[0] == 10.0:
                raise ServerError("no full response within 120 s", code="busy")
            return super().generate(*args, **kwargs)

    for settings, verdict in ((Settings(), "ok"), (Settings(0.5), "fault")):
        clock[0] = 0.0
        server = SlowServer(made.probes, {"tuned": noisy(made.trained, 1)}, sampling=settings)
        check = sampling(Asked(server, "tuned", None, made.reference()))
        assert check.verdict == verdict
        assert 128 <= check.measured["samples"] <= 250
        answered = clock[0] / 5 - 1
        assert check.measured["left_out"] == 64 - answered
        assert f"{64 - answered:.0f} of 64 requests" in check.text


def test_recorded_settings_are_expected() -> None:
    """But a library's defaults, which ms-swift sets in the live model, are nobody's choice."""
    made = world(11, spread=2.0)
    models = {"tuned": noisy(made.trained, 1)}
    chosen = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    library = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    for recorded, settings, verdict in (
        (chosen, Settings(0.7, top_k=20, top_p=0.8), "ok"), (chosen, Settings(), "fault"),
        (library, Settings(top_k=50), "ok"), (library, Settings(), "ok"),
        (library, Settings(top_k=20), "fault"),
    ):  # fmt: skip
        reference = made.reference(tokens={"generation_config": recorded})
        server = ArrayServer(made.probes, models, sampling=settings)
        check = sampling(Asked(server, "tuned", None, reference))
        assert check.verdict == verdict, (recorded, settings)
    other = ArrayServer(made.probes, {"tuned": noisy(made.trained, 1, 0.3)})
    (check,) = run_checks(Asked(other, "tuned", None, reference), ["sampling"])
    assert check.verdict == "unknown"
