"""A row of the user's data -> a raw text, as in pre-training.

There are no turns and no template: the text passes through unchanged, and training puts the
tokenizer's end behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.data.columns import Columns
from tasks.data.messages import Unusable, column_text


def document(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """`{"text"}`.

    Raises:
        Unusable: no such column, something else than text, or nothing but blanks.
    """
    if columns.text is None or columns.text not in values:
        raise Unusable(f"no {columns.text!r}, the column of the text")
    text = column_text(values, columns.text)
    if not text.strip():
        raise Unusable(f"{columns.text!r} is empty: there is nothing to learn")
    return {"text": text}
