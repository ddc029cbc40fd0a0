"""The attention kernel: against float64, and to the last bit against itself in other batches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.serving.native.attention import AttentionKernel, Batch, Cache, attention_kernel
from tests.serving.compiled_for import OLDER, kernel_for

FORMATS = [torch.bfloat16, torch.float32]

pytestmark = pytest.mark.skipif(attention_kernel() is None, reason="no C compiler here")


@pytest.fixture(params=OLDER, scope="module")
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return AttentionKernel(kernel_for(request.param, "attention.c"))


@dataclass(frozen=True)
class Shape:
    """Of a layer, and of the blocks of its cache."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 32
    tokens: int = 32
    dtype: Any = torch.bfloat16

    @property
    def scale(self) -> float:
        return self.dim**-0.5


class Sequences:
    """Tokens of some sequences, all drawn; a cache whose blocks are shuffled, and not a number."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.shape, self.lengths = shape, list(lengths)
        need = [-(-n // shape.tokens) for n in lengths]
        free = iter((torch.randperm(sum(need), generator=draw) + 1).tolist())
        # A cache is a part of a larger piece of memory, and block 0 is no one's.
        wide = 2 * shape.dim
        blocks = torch.full((sum(need) + 1, 2 * shape.kv_heads, shape.tokens, wide), torch.nan)
        self.cache = blocks.to(shape.dtype)[:, : shape.kv_heads]
        self.blocks = torch.zeros(len(need), max(need) + 1, dtype=torch.int32)
        for row, count in enumerate(need):
            self.blocks[row, :count] = torch.tensor([next(free) for _ in range(count)])

        def normal(heads: int) -> list[torch.Tensor]:
            drawn = (torch.randn(n, heads, shape.dim, generator=draw) for n in lengths)
            return [one.to(shape.dtype) for one in drawn]

        self.query = normal(shape.kv_heads * shape.group)
        self.key, self.value = normal(shape.kv_heads), normal(shape.kv_heads)

    def batch(self, parts: dict[int, tuple[int, int]]) -> Batch:
        """Sequences by number, and which of their tokens are new."""
        new = [end - begin for begin, end in parts.values()]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        places = [(row, t) for row, (begin, end) in parts.items() for t in range(begin, end)]
        per_block = self.shape.tokens
        slots = [int(self.blocks[row, t // per_block]) * per_block + t % per_block
                 for row, t in places]  # fmt: skip
        lengths = torch.tensor([end for _, end in parts.values()]).int()
        blocks = self.blocks[list(parts)]
        return Batch(starts, lengths, blocks, torch.tensor(slots), max(new, default=0))

    def attend(self, kernel: AttentionKernel, parts: dict[int, tuple[int, int]]) -> Any:
        """(new tokens, heads, dim), of all sequences."""
        heads = self.shape.kv_heads * self.shape.group
        cache, batch = Cache.of(self.cache, heads, self.shape.scale), self.batch(parts)
        assert cache is not None

        def new(every: list[torch.Tensor]) -> torch.Tensor:
            """Beside other numbers, as they come from a layer that makes all three."""
            told = torch.cat([every[row][begin:end] for row, (begin, end) in parts.items()])
            wide = torch.full((len(told), told.shape[1] + 1, told.shape[2]), torch.nan)
            wide = wide.to(told.dtype)
            wide[:, :-1] = told
            return wide[:, :-1]

        query = new(self.query)
        out = torch.full_like(query, torch.nan)
        kernel.attend(cache, batch.told(), query, new(self.key), new(self.value), out)
        return out

    def expected(self, parts: dict[int, tuple[int, int]]) -> Any:
        """Written out, in float64."""
        found = []
        for row, (begin, end) in parts.items():
            query = self.query[row][begin:end].double()
            key = self.key[row][:end].double().repeat_interleave(self.shape.group, 1)
            value = self.value[row][:end].double().repeat_interleave(self.shape.group, 1)
            scores = torch.einsum("mhd,nhd->hmn", query, key) * self.shape.scale
            later = torch.arange(end)[None, :] > torch.arange(begin, end)[:, None]
            shares = scores.masked_fill(later, -torch.inf).softmax(-1)
            found.append(torch.einsum("hmn,nhd->mhd", shares, value))
        return torch.cat(found)


def require_close(found: Any, expected: Any) -> None:
    """Within one rounding of the number format, and the noise of fp32's sums."""
    close = {"rtol": torch.finfo(found.dtype).eps / 2, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **close)


SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 6, 7, 9]),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    tokens=st.sampled_from([32, 96, 128]),
    dtype=st.sampled_from(FORMATS),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=SHAPES,
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    data=st.data(),
)
def test_it_is_what_is_written_out(
    kernel: Any, shape: Shape, lengths: list[int], data: Any
) -> None:
    """Some tokens first, then all others in a batch."""
    some = Sequences(shape, lengths)
    before = [data.draw(st.integers(0, n - 1)) for n in lengths]
    first = {row: (0, n) for row, n in enumerate(before) if n}
    if first:
        require_close(some.attend(kernel, first), some.expected(first))
    rest = {row: (before[row], n) for row, n in enumerate(lengths)}
    require_close(some.attend(kernel, rest), some.expected(rest))


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_bit_depends_on_the_batch(kernel: AttentionKernel, dtype: Any) -> None:
    """Prompts at once, in other company, and token by token."""
    lengths = [150, 3, 70]
    shape = Shape(dtype=dtype, tokens=64)
    together = Sequences(shape, lengths).attend(kernel, {n: (0, m) for n, m in enumerate(lengths)})
    alone, stepwise = Sequences(shape, lengths), Sequences(shape, lengths)
    parts = [alone.attend(kernel, {n: (0, m)}) for n, m in enumerate(lengths)]
    assert torch.equal(torch.cat(parts), together)
    steps: list[list[torch.Tensor]] = [[] for _ in lengths]
    for t in range(max(lengths)):
        rows = [n for n, m in enumerate(lengths) if t < m]
        out = stepwise.attend(kernel, dict.fromkeys(rows, (t, t + 1)))
        for row, one in zip(rows, out, strict=True):
            steps[row].append(one)
    assert torch.equal(torch.stack([one for row in steps for one in row]), together)


def test_no_bit_depends_on_threads() -> None:
    code = """
import torch
from tasks.serving.native.attention import attention_kernel
from tests.serving.test_attention_kernel import Sequences, Shape
def found(threads):
    torch.set_num_threads(threads)
    some = Sequences(Shape(group=5), [120, 64, 3, 1])
    return some.attend(attention_kernel(), {n: (0, m) for n, m in enumerate(some.lengths)})
assert torch.equal(found(1), found(3))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_prompt_that_begins_as_another_one(kernel: AttentionKernel, dtype: Any) -> None:
    """It is given blocks whose keys are computed within the same batch, later in it."""
    shape = Shape(dtype=dtype)
    some, plain = Sequences(shape, [50, 50]), Sequences(shape, [50, 50])
    for every in (*(one.key for one in (some, plain)), *(one.value for one in (some, plain))):
        every[0][:32] = every[1][:32]
    some.blocks[0, 0] = some.blocks[1, 0]
    found = some.attend(kernel, {0: (32, 50), 1: (0, 50)})
    assert torch.equal(found, plain.attend(kernel, {0: (0, 50), 1: (0, 50)})[32:])


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_not_finite_stays_so(kernel: AttentionKernel, dtype: Any) -> None:
    some, part = Sequences(Shape(dtype=dtype), [80, 80]), {0: (0, 80), 1: (0, 80)}
    some.key[0][40, 1, 5] = torch.nan
    some.value[1][70, 0, 3] = torch.inf
    found = some.attend(kernel, part).view(2, 80, 2, 3, 32)
    assert found[0, :40].isfinite().all()
    assert found[0, 40:, 1].isnan().all()
    assert found[0, :, 0].isfinite().all()
    assert not found[1, 70:, 0, :, 3].isfinite().any()
    assert found[1, :, 1].isfinite().all()


def test_large_scores(kernel: AttentionKernel) -> None:
    """One token has all of the sum, whatever came before it."""
    some = Sequences(Shape(dtype=torch.float32, group=1, kv_heads=1), [100])
    some.query[0][:] = 1
    some.key[0][:] = torch.linspace(-1e4, 1e4, 100)[:, None, None]
    assert torch.equal(some.attend(kernel, {0: (0, 100)}), some.value[0])
    some.key[0][:] = torch.linspace(1e4, -1e4, 100)[:, None, None]
    first = some.value[0][:1].expand(100, 1, 32)
    assert torch.equal(some.attend(kernel, {0: (0, 100)}), first)


def test_a_token_that_is_not_kept(kernel: AttentionKernel) -> None:
    some = Sequences(Shape(), [5])
    cache, batch = Cache.of(some.cache, 6, 1.0), some.batch({0: (0, 5)})
    assert cache is not None
    batch.slots[3] = -1
    out = torch.empty_like(some.query[0])
    kernel.attend(cache, batch.told(), some.query[0], some.key[0], some.value[0], out)
    block = some.cache[some.blocks[0, 0].item(), 0].reshape(2, 32, 32)
    assert torch.equal(block[0, [0, 1, 2, 4]], some.key[0][[0, 1, 2, 4], 0])
    assert torch.equal(block[1, [0, 1, 2, 4]], some.value[0][[0, 1, 2, 4], 0])
    assert block[:, 3].isnan().all()
    assert block[:, 5:].isnan().all()


def test_caches_that_it_does_not_know() -> None:
    def asked(*shape: int, heads: int = 4, dtype: Any = torch.bfloat16) -> Cache | None:
        return Cache.of(torch.empty(shape, dtype=dtype), heads, 1.0)

    assert asked(3, 2, 32, 128) is not None
    assert asked(3, 2, 32, 128, dtype=torch.float32) is not None
    assert asked(3, 2, 32, 128, dtype=torch.float16) is None
    assert asked(3, 2, 32, 96) is None  # heads of 48
    assert asked(3, 2, 32, 1024) is None
    assert asked(3, 2, 16, 128) is None
    assert asked(3, 3, 32, 128) is None
    apart = torch.empty(3, 32, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    assert Cache.of(apart, 4, 1.0) is None


def test_tensors_that_it_would_misread() -> None:
    some, kernel = Sequences(Shape(), [5]), attention_kernel()
    assert kernel is not None
    cache, batch = Cache.of(some.cache, 6, 1.0), some.batch({0: (0, 5)})
    assert cache is not None
    turned = some.query[0].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="heads of a token are not in one piece"):
        kernel.attend(cache, batch.told(), turned, some.key[0], some.value[0], turned)
    wrong = Batch(batch.starts, batch.lengths.long(), batch.blocks, batch.slots, 5)
    with pytest.raises(TypeError, match="torch.int64, torch.int32"):
        wrong.told()
