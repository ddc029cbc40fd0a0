"""Faults under load are found and named: crowds, caches, long prompts, streams, mixed adapters."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.core.report import Row
from tasks.verify.compare import Asked
from tasks.verify.load import batching, leak, long_prompts, prefix_cache, streaming
from tests.verify.toy import MODELS, ToyServer, causes, reference


def serving(choose: Any = None, **faults: Any) -> ToyServer:
    """Return a server whose requests meet."""
    chosen = {"choose": choose} if choose else {}
    return ToyServer(pause=0.005, **chosen, **faults)


def asked(check: Any, server: ToyServer, model: str = "base") -> Row:
    made: Row = check(Asked(server, model, "base", reference()))
    return made


def test_a_server_that_always_answers_the_same_is_ok() -> None:
    for check in (batching, prefix_cache, long_prompts, streaming):
        assert asked(check, serving()).verdict == "ok"


def test_faults_under_load_are_named() -> None:
    """Others at the same time, a cache, long prompts that only generation sees, a stream."""
    for check, server, cause in (
        (batching, serving(lambda _, g, crowded, n: int(crowded)), "batch-variance"),
        (prefix_cache, serving(cached=1), "prefix-cache"),
        (long_prompts, serving(lambda _, g, c, length: int(length >= 256 and g)), "long-prompts"),
        (streaming, serving(streamed=1), "streaming"),
    ):
        done = asked(check, server)
        assert (done.verdict, causes(done)) == ("fault", [cause])
        assert all(float(done.measured[key]) > limit for key, limit in done.limit.items())


def test_models_that_keep_apart_are_ok() -> None:
    check = asked(leak, serving(), "tuned")
    assert (check.verdict, check.measured["models"]) == ("ok", 3)
    assert set(check.limit) == {"kl_1", "kl_8", "kl_32"}
    assert asked(leak, serving(lambda *_: 0), "tuned").verdict == "unknown"  # all answer alike


@pytest.mark.parametrize("generation_alone", [False, True])
def test_an_adapter_that_leaks_into_the_base_is_named(generation_alone: bool) -> None:
    def leaking(name: str, generates: bool, crowded: bool, length: int) -> int:
        leaks = name == "base" and crowded and (generates or not generation_alone)
        return 1 if leaks else MODELS[name]

    check = asked(leak, serving(leaking), "tuned")
    assert (check.verdict, causes(check)) == ("fault", ["lora-leak"])


def test_adapters_that_are_mixed_up_are_named() -> None:
    def mixed(name: str, generates: bool, crowded: bool, length: int) -> int:
        return 2 if name == "tuned" and crowded else MODELS[name]

    check = asked(leak, serving(mixed), "tuned")
    assert (check.verdict, causes(check)) == ("fault", ["adapters-mixed"])
    assert "other" in check.text
