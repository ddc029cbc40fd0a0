from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.errors import ConfigError
from tasks.weights.execute.writer import (
    Spec,
    parse_size,
    plan_shards,
    shard_file,
    shard_names,
)
from tasks.weights.files.header import ITEM_BITS, read_header


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BITS)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=12,
    )
)
def test_safetensors_reads_a_planned_header(tmp_path_factory, kinds) -> None:
    from safetensors import safe_open

    specs = [Spec(f"t{i}", tuple(shape), dtype) for i, (dtype, shape) in enumerate(kinds)]
    planned = shard_file("model.safetensors", specs)
    path = tmp_path_factory.mktemp("planned") / planned.name
    path.write_bytes(planned.head + bytes(planned.size - len(planned.head)))
    assert read_header(path).tensors == planned.infos
    for info in planned.infos.values():
        assert info.start % (ITEM_BITS[info.dtype] // 8) == 0  # aligned to its own width
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {spec.name for spec in specs}
        assert file.metadata() == {"format": "pt"}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_shards_keep_order_lose_nothing_and_are_full(sizes: list[int], limit: int) -> None:
    specs = [Spec(str(i), (size,), "U8") for i, size in enumerate(sizes)]
    shards = plan_shards(specs, limit)
    assert [spec for shard in shards for spec in shard] == specs
    assert all(shards)
    totals = [sum(spec.nbytes for spec in shard) for shard in shards]
    for shard, total in zip(shards, totals, strict=True):
        assert total <= limit or len([s for s in shard if s.nbytes]) == 1
    for total, following in zip(totals, shards[1:], strict=False):
        assert total + following[0].nbytes > limit
    assert len(shard_names(len(shards))) == len(shards)


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 MiB": 3 << 19, "200kb": 200_000, 77: 77, "9": 9}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("5TB", "GB", "-1", "0", "1e9"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            parse_size(text)
