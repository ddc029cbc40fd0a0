"""Rules about vLLM agree with the code of the installed vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tasks.audit.known import known

pytestmark = pytest.mark.slow


def test_classes() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    plain = SimpleNamespace(runner_type=None, convert_type=None)
    lists = known()
    names = {name for classes in lists.kinds.values() for name in classes} | {"RewardModel"}
    for name in sorted(names):
        resolved = ModelRegistry._normalize_arch(name, plain)
        assert (resolved in ModelRegistry.models) == lists.serves(name), name
