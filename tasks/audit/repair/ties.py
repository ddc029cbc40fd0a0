"""Tied embeddings: stored once where they are one, and said to be two where they are two."""

from __future__ import annotations

from tasks.audit.checks.adapters.same_bytes import differ
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.recognise import CONFIG
from tasks.audit.repair.draft import Draft


def settle_ties(draft: Draft) -> None:
    """Of a model that is said to be tied and holds both: drop the copy, or untie it.

    Raises:
        ArtifactError: the tensors cannot be read.
    """
    source = draft.source
    held = {new: source.tensors[old] for new, old in draft.names.items()}
    found = embeddings_of(held, source.config())
    if not (source.is_model and found.tied and found.input and found.output):
        return
    head, embedding = draft.names[found.output], draft.names[found.input]
    same = held[found.output].shape == held[found.input].shape and (
        held[found.output].dtype == held[found.input].dtype
    )
    if same and not differ((source, head), (source, embedding)):
        del draft.names[found.output]
        draft.done.append(f"{found.output}: left out, it is {found.input} byte for byte")
        return
    draft.edit(CONFIG, tie_word_embeddings=False)
    draft.done.append(f"{CONFIG}: tie_word_embeddings is false: the two differ")
