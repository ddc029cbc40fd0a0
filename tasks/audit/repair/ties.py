"""Repair tied embeddings: store them once if they are equal, untie them if they differ."""

from __future__ import annotations

from tasks.audit.checks.adapters.same_bytes import differ
from tasks.audit.checks.text.embeddings import embeddings_of
from tasks.audit.recognise import CONFIG
from tasks.audit.repair.draft import Draft


def settle_ties(draft: Draft) -> None:
    """Drop the copy, or untie the two, in a model that ties its embeddings and stores both.

    Raises:
        ArtifactError: the tensors cannot be read.
    """
    source = draft.source
    tensors = {new: source.tensors[old] for new, old in draft.names.items()}
    embeddings = embeddings_of(tensors, source.config())
    if not (source.is_model and embeddings.tied and embeddings.input and embeddings.output):
        return
    head, embedding = draft.names[embeddings.output], draft.names[embeddings.input]
    same = tensors[embeddings.output].shape == tensors[embeddings.input].shape and (
        tensors[embeddings.output].dtype == tensors[embeddings.input].dtype
    )
    if same and not differ((source, head), (source, embedding)):
        del draft.names[embeddings.output]
        draft.done.append(
            f"{embeddings.output}: left out, it equals {embeddings.input} byte for byte"
        )
        return
    draft.edit(CONFIG, tie_word_embeddings=False)
    draft.done.append(f"{CONFIG}: tie_word_embeddings is false: the two differ")
