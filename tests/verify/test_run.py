"""All checks in their order: what a report says about servers whose weights are known arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tasks.verify.compare import align, kl_of
from tasks.verify.run import Target, verify
from tasks.verify.servers.server import ServerError
from tasks.witness.plumbline_witness.prints import FormatNoise
from tests.verify.synthetic import ArrayServer, world
from tests.verify.synthetic import answers as scores

TRAINED = world(seed=4, count=8, moved=0.4)


def server(**models: float) -> ArrayServer:
    """Return a server of adapters with this share of the trained update each, and of the base."""
    shift = TRAINED.trained - TRAINED.base
    logits = {name: TRAINED.base + share * shift for name, share in models.items()}
    return ArrayServer(TRAINED.probes, {"base": TRAINED.base, **logits})


def test_the_trained_model_is_verified_and_the_rest_named() -> None:
    report = verify(server(lora=1.0), Target("lora", "base"), TRAINED.reference(), "standard")
    assert report.outcome == "verified", report.text()
    assert {"template", "tokens"} <= set(report.unproven)
    assert "not proven: template, tokens" in report.line


def test_noise_beside_an_exact_base_is_in_the_adapter() -> None:
    """Rounding would change the base as well."""
    noise = np.random.default_rng(1).normal(0, 0.15, TRAINED.trained.shape)
    known = server()
    known._models["noisy"] = TRAINED.trained + noise
    report = verify(known, Target("noisy", "base"), TRAINED.reference(), "standard")
    assert report.outcome == "fault"
    assert "partly-other-weights" in [cause.code for cause in report.causes]


def test_a_server_that_goes_away_leaves_everything_unknown() -> None:
    class Gone(ArrayServer):
        def score(self, *args: object, **others: object) -> list[object]:  # type: ignore[override]
            raise ServerError("no answer", code="unreachable")

    known = Gone(TRAINED.probes, {"lora": TRAINED.trained})
    report = verify(known, Target("lora", None), TRAINED.reference(), "standard")
    assert report.outcome == "unverified"
    assert {check.text for check in report.checks} == {"no answer"}


NOISE = 1.5
"""Standard deviation of an engine's error of a logit: far above what this adapter moves."""


def light(share: float, moved: float = 0.5) -> tuple[str, Mapping[str, str], list[str]]:
    """Verify a server with noise, whose adapter's share is `share`: outcome, verdicts, causes."""
    own = world(seed=6, count=24, vocab=400, moved=moved)
    random = np.random.default_rng(2)
    logits = own.base + share * (own.trained - own.base)
    logits = logits + random.normal(0, NOISE, logits.shape)
    made = own.reference()
    kl = float(kl_of(made.trained, align(made.trained, scores(own.probes, logits))).mean())
    noise = FormatNoise(mean_kl=kl, p95_kl=4 * kl, median_kl=kl, top1_agreement=0.7)
    trained = replace(made.trained, formats=dict.fromkeys(("bfloat16", "float32"), noise))
    known = ArrayServer(own.probes, {"merged": logits})
    report = verify(known, Target("merged", None), replace(made, trained=trained), "standard")
    verdicts: dict[str, str] = {check.code: check.verdict for check in report.checks}
    return report.outcome, verdicts, [cause.code for cause in report.causes]


def test_an_adapter_below_the_noise_is_judged_by_its_share() -> None:
    """KL calls both the trained model; the share tells the base."""
    _, verdicts, _ = light(1.0)
    assert (verdicts["distribution"], verdicts["adapter"]) == ("ok", "ok")
    outcome, verdicts, causes = light(0.0)
    assert causes[0] == "base-served"
    assert (outcome, verdicts["distribution"], verdicts["adapter"]) == ("fault", "ok", "fault")
    assert {"adapter-scaled", "rounded-away"} <= set(light(0.3)[2])


def test_probes_without_power_prove_nothing() -> None:
    for share in (0.0, 1.0):
        outcome, verdicts, _ = light(share, moved=0.01)
        assert (outcome, verdicts["adapter"]) == ("unverified", "unknown")
