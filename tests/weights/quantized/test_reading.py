"""A packed base looks like the model that was packed, under its own keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.execute.journal import identify
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.operations import Plan
from tasks.weights.quantized.config_fields import is_packed, stored
from tasks.weights.quantized.source import PackedCheckpoint, read_base
from tests.weights.quantized.making import (
    Q_PROJ,
    alter,
    decode_all,
    restored,
    same,
    write_packed,
)


def test_looks_like_the_model_that_was_packed(nf4: Path, qwen: Artifact) -> None:
    packed = read_base(nf4)
    plain = read_base(qwen.path)
    assert isinstance(packed, PackedCheckpoint)
    described = {k: (tuple(t.shape), t.dtype) for k, t in packed.tensors.items()}
    assert described == {k: (tuple(t.shape), t.dtype) for k, t in plain.tensors.items()}
    assert set(packed.files) == set(described)
    assert packed.checksum(Q_PROJ) is None
    assert sum(len(packed.extents(key)) for key in packed.tensors) == len(packed.whole.tensors)
    facts, expected = model_facts(nf4), model_facts(qwen.path)
    assert facts.findings == ()
    assert set(facts.tensors) == set(expected.tensors)
    assert facts.tied == expected.tied
    assert set(facts.quantized) == set(expected.quantized)


def test_early_configurations_are_understood() -> None:
    early = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}}
    assert is_packed(early)
    assert stored(early) == "bitsandbytes, 4 bits"
    assert stored({}) is None
    assert stored({"quantization_config": {}}) is None


def test_changed_scales_change_the_identity_of_the_input(copy: Path) -> None:
    """An interrupted run is not continued if only a tensor beside a matrix has changed."""
    identities = set()
    for _ in range(2):
        sources = open_sources({"base": SourceRef(copy, "base")})
        identities.add(identify(Plan(()), sources, "model"))
        alter(copy, lambda tensors: tensors[Q_PROJ + ".absmax"].add_(1))
    assert len(identities) == 2


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_folder_is_refused_or_decodes_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A tensor that is lost, resized, retyped or renamed is always noticed."""
    folder = tmp_path_factory.mktemp("mutated")
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    double = data.draw(st.booleans())
    write_packed(folder, {"a.weight": matrix, "b.weight": matrix}, compress_statistics=double)
    expected = restored(folder)
    tensors = load_file(folder / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["drop", "shorten", "widen", "retype", "rename", "reshape"]))
    tensor = tensors.pop(name)
    if kind == "shorten":
        tensors[name] = tensor.reshape(-1)[:-1].clone()
    elif kind == "widen":
        tensors[name] = torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]])
    elif kind == "retype":
        tensors[name] = tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32)
    elif kind == "rename":
        tensors[name.replace(".weight", ".wait")] = tensor
    elif kind == "reshape":
        tensors[name] = tensor.reshape(1, -1).clone()
    save_file(tensors, folder / "model.safetensors")
    try:
        decoded = decode_all(folder, folder / "out")
    except ArtifactError:
        refused = True
    else:
        refused = False
        assert same(decoded, expected) == []
    assert refused == (kind != "reshape")
