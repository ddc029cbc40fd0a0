"""Checks of served responses: loops, exact match, ties of greedy tokens, rates, drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.evaluation import checks
from tasks.evaluation.checks import Agreement, compare_greedy
from tasks.serving.prompts import is_degenerate


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([3] * 15, False),
        (list(range(10)) * 3, False),
        (list(range(10)) * 4, True),
        ([8, 9, *[3] * 16, 4], True),
        (list(range(17)) * 9, False),  # a longer block than is looked for
    ],
)
def test_loops(tokens: list[int], loops: bool) -> None:
    assert is_degenerate(tokens) is loops


STEPS = [[(4, 16.0), (5, 15.9), (6, 15.0)], [(7, 3.0), (8, 1.0)]]


def test_greedy_tokens_are_equal_tied_or_different() -> None:
    for tokens, equal, ties in (
        ([4, 7], 1, 0),
        ([4, 7, 1, 1], 1, 0),
        ([5, 9], 0, 1),  # 0.1 apart, a step is 0.125
        ([6, 7], 0, 0),
        ([9, 7], 0, 0),  # no candidate
        ([4], 0, 0),
    ):
        agreement = compare_greedy([tokens], [[4, 7]], [STEPS])
        assert (agreement.equal, agreement.ties) == (equal, ties), tokens
        assert len(agreement.differences) == 1 - equal - ties


def test_ties_are_narrower_in_a_finer_dtype_and_wider_with_noise() -> None:
    assert compare_greedy([[5, 9]], [[4, 7]], [STEPS], dtype="float32").ties == 0
    assert compare_greedy([[6]], [[4, 7]], [STEPS], noise=0.9).ties == 0
    assert compare_greedy([[6]], [[4, 7]], [STEPS], noise=1.1).ties == 1


def test_stray_weights_are_found_beside_one_file_and_beside_shards(tmp_path: Path) -> None:
    def touch(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_bytes(b"")

    touch("model.safetensors", "config.json", "fingerprint.fp")
    assert checks.stray_weights(tmp_path).ok
    touch("value_head.safetensors", "adapter_model.bin")
    strays = checks.stray_weights(tmp_path)
    assert (strays.ok, strays.found) == (False, "adapter_model.bin, value_head.safetensors")
    for name in ("adapter_model.bin", "value_head.safetensors"):
        (tmp_path / name).unlink()
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    touch(*shards)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    assert checks.stray_weights(tmp_path).found == "model.safetensors"
    index.write_text("{}")
    with pytest.raises(ArtifactError, match="weight_map"):
        checks.stray_weights(tmp_path)


def test_rates_of_greedy_stop_and_degenerate_responses() -> None:
    assert checks.greedy_check(Agreement(30, 2, ())).ok
    assert not checks.greedy_check(Agreement(31, 0, ("prompt 3: ...",))).ok
    assert not checks.greedy_check(Agreement(0, 0, ())).ok  # nothing was compared
    for ended, ok in ((32, True), (27, True), (25, False), (0, False)):  # of 32: 0.9 is 28.8
        assert checks.stop_check([True] * ended + [False] * (32 - ended), 0.9).ok is ok
    # One of 32 is within the error of 2 %; 12 before training make the limit 38 %.
    for before, after, ok in ((0, 1, True), (0, 3, False), (12, 17, True), (12, 19, False)):
        tokens = ([[1, 2, 3]] * (32 - count) + [[0] * 40] * count for count in (after, before))
        assert checks.degenerate_check(next(tokens), 0.02, next(tokens)).ok is ok
    probes = [[1, 2, 3, 9], [1, 4]]  # the second one was cut within its prompt
    assert checks.probes_check(probes, [[1, 2, 3], [1, 4, 5]]).ok
    assert not checks.probes_check(probes, [[0, 1, 2, 3], [1, 4, 5]]).ok
