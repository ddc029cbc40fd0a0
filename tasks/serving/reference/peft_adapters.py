"""Load an adapter onto a model with peft, unmerged, as the reference of a delivery.

Some adapters need more than peft's loader does: the number of embedding rows that they were trained
with, factors in the layout of the installed peft version, and their stored dtype.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.reader import ADAPTER, read_header
from tasks.weights.lora import CONFIG, PICKLED, Adapter, read_adapter
from tasks.weights.model import Model, live_model
from tasks.weights.pairing import Pairing
from tasks.weights.pickled.torch_file import read_state
from tasks.weights.plan import LowRank


def with_adapter(model: Any, folder: Path) -> Any:
    """Load an adapter onto a model, unmerged.

    Raises ArtifactError if the folder has no adapter, or it does not fit the model.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    adapter, live = read_adapter(folder), live_model(model)
    pairing = Pairing(adapter.config, live, adapter.tensors)
    names = (live.input_embedding, live.output_embedding)
    shapes = [pairing.shape(f"{module}.weight") for module in names if module]
    rows = {shape[0] for shape in shapes if shape}  # that the adapter stores
    grown = rows - {live.parameters[f"{live.input_embedding}.weight"][0]} if rows else set()
    if len(grown) == 1:
        model.resize_token_embeddings(grown.pop(), mean_resizing=False)
    try:
        with _in_installed_layout(adapter, live) as path:
            model = PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"{folder} cannot be loaded: {first_lines(error)}") from error
    _as_stored(model, adapter)
    return model


def first_lines(error: BaseException) -> str:
    """Return the first non-empty line of an error, plus the next one if it ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:400]


@contextlib.contextmanager
def _in_installed_layout(adapter: Adapter, live: Model) -> Iterator[Path]:
    """Yield the adapter's folder, or a copy with names and layouts of the installed peft."""
    import torch
    from safetensors.torch import load_file, save_file

    file, pickled = adapter.root / f"{ADAPTER}.safetensors", adapter.root / PICKLED
    stored = list(read_header(file).tensors if file.is_file() else read_state(pickled))
    other_layout = list(_other_layout(adapter, live))
    # peft finds none of the names that have prefixes of wrappers.
    if not other_layout and all(name in adapter.tensors for name in stored):
        yield adapter.root
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if file.is_file():
            tensors = load_file(file)
        else:
            tensors = torch.load(pickled, weights_only=True)
        tensors = {key: tensors[name] for key, name in without_wrappers(tensors).items()}
        for term in other_layout:
            at_a, at_b = (name.partition(":")[2] for name in (term.a, term.b))
            a, b, experts = tensors[at_a], tensors[at_b], term.experts
            by_expert = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
            tensors[at_a] = by_expert[1].permute(2, 1, 0).flatten(0, 1).contiguous()
            tensors[at_b] = by_expert[0].permute(2, 1, 0).flatten(1).contiguous()
        save_file(tensors, folder / f"{ADAPTER}.safetensors")
        shutil.copy(adapter.root / CONFIG, folder)
        yield folder


def _other_layout(adapter: Adapter, live: Model) -> Iterator[LowRank]:
    """Yield the factor pairs of expert stacks that an older peft saved in another layout."""
    if not adapter.config.target_parameters:
        return
    for piece in Pairing(adapter.config, live, adapter.tensors).pieces:
        term = piece.term
        if isinstance(term, LowRank) and len(live.parameters[piece.target]) == 3:
            module = piece.target.rpartition(".")[0]
            if term.transpose != (module in live.transposed):
                yield term


def _as_stored(model: Any, adapter: Adapter) -> None:
    """Give factors their stored dtype; on a 4-bit base peft always makes them float32.

    Modules that are saved in full keep the dtype of the base.
    """
    import torch

    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    stored = {
        key: dtypes[info.dtype] for key, info in adapter.tensors.items() if info.dtype in dtypes
    }
    for full, parameter in model.named_parameters():
        parts = full.split(".")
        dtype = stored.get(".".join(part for part in parts if part != "default"))
        if dtype is not None and "default" in parts and "modules_to_save" not in parts:
            parameter.data = parameter.data.to(dtype)
