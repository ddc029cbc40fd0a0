"""Traced conversions agree with the same conversions of real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.weights.families.places import places_of
from tasks.weights.families.traced import Traced, UntraceableError

Step = tuple[str, int, int]


def run(inputs: list, steps: list[Step]) -> list:
    """Run a chain of the operations of transformers' conversions on a list of equal tensors."""
    tensors = inputs
    for kind, a, b in steps:
        if kind == "stack":
            tensors = [torch.stack(tensors, dim=a % (tensors[0].dim() + 1))]
        elif kind == "cat":
            tensors = [torch.cat(tensors, dim=a % tensors[0].dim())]
        elif kind == "transpose":
            dims = tensors[0].dim()
            tensors = [torch.transpose(tensor, dim0=a % dims, dim1=b % dims) for tensor in tensors]
        else:
            dim = a % tensors[0].dim()
            tensors = [
                part for tensor in tensors for part in torch.chunk(tensor, b % 3 + 1, dim=dim)
            ]
            tensors = [
                tensor for tensor in tensors if tuple(tensor.shape) == tuple(tensors[0].shape)
            ]
    return tensors


STEPS = st.tuples(
    st.sampled_from(["stack", "cat", "transpose", "chunk"]), st.integers(0, 3), st.integers(0, 3)
)


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(1, 4),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    steps=st.lists(STEPS, max_size=4),
)
def test_a_place_gives_the_tensor_on_disk(count, shape, steps) -> None:
    """A place is read like a source: a range of elements, then the transposition."""
    numel = torch.Size(shape).numel()
    real = {str(i): torch.arange(numel).reshape(shape) + 1000 * i for i in range(count)}
    disk = {key: tuple(shape) for key in real}
    live = run(list(real.values()), steps)
    for origin, tensor in zip(run([Traced.of(k, shape) for k in real], steps), live, strict=True):
        try:
            places = places_of("live", origin, disk)
        except ValueError:
            continue  # scattered: refused
        for place in places:
            if not place.whole:
                continue
            flat = tensor.reshape(-1)[place.start : place.start + numel]
            turned = (*shape[:-2], shape[-1], shape[-2]) if place.transpose else shape
            part = flat.reshape(turned)
            part = part.transpose(-1, -2) if place.transpose else part
            assert torch.equal(part, real[place.disk])


def test_conversions_that_cannot_be_traced_are_refused() -> None:
    traced = Traced.of("a", (4, 4))
    with pytest.raises(UntraceableError, match="reshape"):
        traced.reshape(2, 8)
    with pytest.raises(UntraceableError, match="flip"):
        torch.flip(traced, [0])
    with pytest.raises(ValueError, match="join"):
        torch.cat([Traced.of("a", (2, 3)), Traced.of("b", (2, 4))], dim=0)
    scattered = torch.cat([Traced.of("a", (2, 3)), Traced.of("b", (2, 3))], dim=1)
    with pytest.raises(ValueError, match="live"):
        places_of("live", scattered, {"a": (2, 3), "b": (2, 3)})
