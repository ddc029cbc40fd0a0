"""Catalogue of all findings: meaning, failing tool, public reports and fix.

SECTIONS      sections of `docs/findings.md`, in the order of the page
CATALOGUE     every entry by its code
unseen        reported failures that leave no trace in files

Make the page with `python -m tasks.audit.page > docs/findings.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.audit.catalogue import adapters, files, heads, model, tensors, text, values, witness
from tasks.audit.finding import Entry, Section

SECTIONS: Sequence[type[Section]] = (
    files.Folders,
    files.Files,
    tensors.Headers,
    tensors.Zero,
    tensors.Residue,
    heads.Heads,
    adapters.Adapters,
    witness.Records,
    text.Vocabulary,
    text.SpecialTokens,
    text.TokenIds,
    text.Templates,
    model.Architecture,
    model.Quantisation,
    model.Dtypes,
    model.Experts,
    adapters.Serving,
    model.Configuration,
    values.AgainstBase,
    values.Merges,
    files.Unsafe,
    values.Values,
)

CATALOGUE: Mapping[str, Entry] = {
    entry.code: entry for section in SECTIONS for entry in section.entries()
}
