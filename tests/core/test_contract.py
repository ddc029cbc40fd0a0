"""Contracts: every expected tensor once, nothing unexpected, and all failures in one error."""

from __future__ import annotations

import pickle

import pytest

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import ContractError, StageProcessError
from tasks.weights.files.tensors import Tensor


def info(*shape: int, dtype: str = "BF16") -> Tensor:
    return Tensor(tuple(shape), dtype)


def test_a_failed_check_names_the_tensor_and_its_value() -> None:
    expected = [Expected("a", (2, 3), "BF16")]
    (check,) = judge(expected, {"a": info(2, 3)})
    assert check.ok
    for tensors, text in (
        ({}, "missing"),
        ({"a": info(0)}, "BF16 [0]"),
        ({"a": info(2, 3, dtype="F32")}, "F32 [2, 3]"),
        ({"a": info(3, 2)}, "BF16 [3, 2]"),
    ):
        (check,) = judge(expected, tensors)
        assert (check.ok, check.found) == (False, text)
    checks = judge(expected, {"a": info(2, 3), "v_head.weight": info(1, 4)})
    assert [(c.name, c.ok) for c in checks] == [("a", True), ("v_head.weight", False)]


def test_errors_list_every_failure_and_survive_pickling_with_their_own_fields() -> None:
    checks = judge([Expected(f"t{i}", (2,)) for i in range(3)], {})
    with pytest.raises(ContractError) as caught:
        require(checks, stage="gather")
    error = pickle.loads(pickle.dumps(caught.value))
    assert "\n" not in str(error)
    assert [line.split(":")[0] for line in error.details] == ["t0", "t1", "t2"]
    error = pickle.loads(pickle.dumps(StageProcessError("train", -9, ["one", "two", ""], "exit")))
    assert (error.stage, error.returncode, error.reason) == ("train", -9, "exit")
    assert error.details == ("one", "two", "")
