"""Catalogue of all findings: meaning, failing tool, public reports and fix.

SECTIONS      sections of `docs/findings.md`, in the order of the page
CATALOGUE     every entry by its code
unseen        reported failures that leave no trace in files

Make the page with `python -m tasks.audit.page > docs/findings.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.audit.catalogue import adapters, files, heads, model, tensors, text, values
from tasks.audit.finding import Entry, Section

SECTIONS: Sequence[Section] = (
    files.FOLDER,
    files.FILES,
    tensors.HEADERS,
    tensors.ZERO,
    tensors.RESIDUE,
    heads.HEADS,
    adapters.ADAPTERS,
    text.VOCABULARY,
    text.SPECIAL_TOKENS,
    text.TEMPLATES,
    model.ARCHITECTURE,
    model.QUANTISATION,
    model.DTYPES,
    model.EXPERTS,
    adapters.SERVING,
    model.CONFIGURATION,
    values.AGAINST_BASE,
    values.MERGES,
    files.UNSAFE,
    values.VALUES,
)

CATALOGUE: Mapping[str, Entry] = {
    entry.code: entry for section in SECTIONS for entry in section.entries
}
