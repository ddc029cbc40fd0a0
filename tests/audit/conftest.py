"""The corpus of checkpoints, made once."""

from __future__ import annotations

import pytest

from tests.audit.corpus import Corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    from tests.audit.corpus.clean import CLEAN

    return Corpus(tmp_path_factory.mktemp("corpus"), CLEAN)
