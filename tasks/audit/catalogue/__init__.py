"""Every code there is, once: what it means, which tool fails on it, who reported it, what to do.

`docs/findings.md` is made from it: `python -m tasks.audit.page > docs/findings.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from tasks.audit.catalogue import (
    adapter,
    against_base,
    architecture,
    configuration,
    dtypes,
    experts,
    files,
    folder,
    headers,
    heads,
    merge_proof,
    quantisation,
    residue,
    serving,
    special_tokens,
    templates,
    unsafe,
    values,
    vocabulary,
    zero,
)
from tasks.audit.catalogue.entry import Entry

PAGES: Sequence[ModuleType] = (
    folder,
    files,
    headers,
    zero,
    residue,
    heads,
    adapter,
    vocabulary,
    special_tokens,
    templates,
    architecture,
    quantisation,
    dtypes,
    experts,
    serving,
    configuration,
    against_base,
    merge_proof,
    unsafe,
    values,
)
"""One module of entries a family; the first line of its docstring is its heading."""


def entries(page: ModuleType) -> Iterator[Entry]:
    """A module's entries, as they stand in it."""
    return (one for one in vars(page).values() if isinstance(one, Entry))


CATALOGUE: Mapping[str, Entry] = {one.code: one for page in PAGES for one in entries(page)}
"""By code."""
