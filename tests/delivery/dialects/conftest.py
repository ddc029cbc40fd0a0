"""One training that every tool saves in its own format, and the merge expected from all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.delivery.test_deliver import merged_by_peft
from tests.weights.making import Spread, trained_model


@pytest.fixture(scope="session")
def trained(base: Path) -> Any:
    """The live PEFT model behind `adapter`."""
    return trained_model(base, Spread(), 1)


@pytest.fixture(scope="session")
def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The merge of `trained` by peft."""
    return merged_by_peft(base, adapter)
