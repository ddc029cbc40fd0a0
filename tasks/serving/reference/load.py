"""Load a model for measuring, exactly as it is on disk. Runs in child processes only."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.core.machine import available_memory
from tasks.serving.llama_cpp import gguf_file
from tasks.serving.reference.requests import ModelRef
from tasks.weights.files.documents import read_json
from tasks.weights.files.names import PEFT_PREFIX, unwrap, without_wrappers
from tasks.weights.files.reader import ADAPTER, read_header, weight_files
from tasks.weights.lora import CONFIG, PICKLED, Adapter, Pairing, read_adapter
from tasks.weights.model import Model, live_model
from tasks.weights.model_class import (
    kept_from_four_bits,
    language_class,
    loadable_attention,
    read_config,
)
from tasks.weights.pickled.torch_file import read_state, read_torch_file
from tasks.weights.plan import LowRank
from tasks.weights.quantized.config_fields import fp8_blocks, is_fp8
from tasks.weights.quantized.nf4 import keep_as_loaded
from tasks.weights.quantized.packed import is_activation_scale

FOUR_BITS = 0.35
"""Size of a 4-bit model relative to 16 bits, including scales, norms and embeddings."""
FILLED = 0.8
"""Share of a GPU's free memory that a model may fill: logits and activations need the rest."""


def load_model(model: ModelRef, *, as_stored: bool = False) -> Any:
    """Load a causal language model in eval mode, its adapter unmerged in its stored dtype.

    `as_stored` is that of `from_folder`.
    """
    loaded = from_folder(None, model.path, as_stored=as_stored, **options(model))
    loaded = (loaded if model.adapter is None else with_adapter(loaded, model.adapter)).eval()
    if model.float32:
        widen(loaded)
    return loaded


def from_folder(
    auto: str | None,
    path: Path,
    *,
    dtype: str = "bfloat16",
    attn_implementation: str = "sdpa",
    quantization: Mapping[str, Any] | None = None,
    gaps: Collection[str] = (),
    device_map: Any = None,
    as_stored: bool = False,
    **extra: Any,
) -> Any:
    """Load a model from local files, and check that all its tensors are there.

    `auto` is transformers' auto class, None for the one that predicts tokens. `quantization` is
    `{"type": "nf4" | "fp4", "double_quant": bool, "compute_dtype": str}`; `dtype` that of
    everything that is not quantised. `gaps` are tensors that may be missing in the files or left
    over. `as_stored` lets transformers read fp8, which may quantise activations, too. `extra` goes
    to `from_pretrained`. Raises ArtifactError for a folder that is missing, unreadable or
    incomplete, or has tensors that the model does not have.
    """
    import torch
    import transformers

    if not (path / "config.json").is_file():
        raise ArtifactError(f"{path} is not a model folder: no config.json")
    auto_class = getattr(transformers, auto) if auto else language_class(read_config(path))
    if quantization is not None:
        extra["quantization_config"] = quantization_config(quantization, path)
    elif (file := gguf_file(path)) is not None:
        extra["gguf_file"] = file.name
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where: Path | None = path
    state = (None if as_stored else _fp8_weights(path)) or _unwrapped(path)
    if state is not None:
        config, extra = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, return_unused_kwargs=True, **extra
        )
        if not as_stored and is_fp8(config.to_dict()):
            del config.quantization_config
        auto_class, where = auto_class._model_mapping[type(config)], None
        extra |= {"config": config, "state_dict": state}
    try:
        model, info = auto_class.from_pretrained(
            where,
            dtype=getattr(torch, dtype),
            attn_implementation=loadable_attention(
                read_json(path / "config.json"), attn_implementation
            ),
            device_map=device_map,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **extra,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(f"{path} cannot be loaded: {first_lines(error)}") from error
    refuse_gaps(path, info, gaps)
    return keep_as_loaded(model)


def _fp8_weights(path: Path) -> dict[str, Any] | None:
    """Return all tensors of a model stored in fp8, decoded by torch; None for other models.

    transformers 5.19 decodes partial blocks wrongly or not at all. The merge decodes with other
    code (`weights/quantized/packed.py`), so that the one checks the other.
    """
    import torch
    from safetensors.torch import load_file

    config = read_json(path / "config.json")
    if not is_fp8(config):
        return None
    tensors: dict[str, Any] = {}
    for file in sorted(path.glob("model*.safetensors")):
        tensors |= load_file(file)
    high, wide = next(iter(fp8_blocks(config)), (1, 1))
    for key in [key for key, each in tensors.items() if each.dtype is torch.float8_e4m3fn]:
        scale = tensors.pop(f"{key}_scale_inv", None)
        scale = tensors.pop(f"{key}_scale") if scale is None else scale
        rows, columns = tensors[key].shape[-2:]
        scale = scale.float()
        scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
        if scale.shape[-2] not in (1, rows):
            scale = scale.repeat_interleave(high, -2)[..., :rows, :]
        if scale.shape[-1] != 1:
            scale = scale.repeat_interleave(wide, -1)[..., :columns]
        tensors[key] = (tensors[key].float() * scale).to(torch.bfloat16)
    return {key: each for key, each in tensors.items() if not is_activation_scale(key)}


def _unwrapped(path: Path) -> dict[str, Any] | None:
    """Return all tensors under names without prefixes of wrappers; None if no name has one."""
    import torch
    from safetensors.torch import load_file

    files = weight_files(path, "model*.safetensors")
    pickled = [] if files else weight_files(path, "pytorch_model*.bin")
    names = [name for file in files for name in read_header(file).tensors]
    names += [name for file in pickled for name in read_torch_file(file)]
    if not any(unwrap(name) != name or name.startswith(PEFT_PREFIX) for name in names):
        return None
    states = [*map(load_file, files), *(torch.load(file, weights_only=True) for file in pickled)]
    tensors = {name: each for state in states for name, each in state.items()}
    plain = without_wrappers(tensors).items()
    return {key.removeprefix(PEFT_PREFIX): tensors[name] for key, name in plain}


def options(model: ModelRef) -> dict[str, Any]:
    """Return the options of `from_folder` for a model, with devices and attention that are there.

    Devices are one, or all GPUs of this node for a large model. Flash attention needs a GPU and a
    package, else sdpa takes its place; fingerprints record the implementation.
    """
    import torch
    from transformers import utils

    attention, device_map = model.attn_implementation, None
    if attention.startswith("flash_attention"):
        is_available = getattr(utils, f"is_{attention.replace('attention', 'attn')}_available")
        attention = attention if is_available() else "sdpa"
    if model.device != "cpu" and torch.cuda.is_available():
        files = weight_files(model.path, "*.safetensors", "*.bin", "*.gguf")
        needed = sum(file.stat().st_size for file in files) * (
            FOUR_BITS if model.quantization else 1
        )
        device_map = {"": "cuda:0"} if needed <= FILLED * torch.cuda.mem_get_info(0)[0] else "auto"
    elif model.quantization is not None:  # transformers would put it on a GPU
        device_map = {"": "cpu"}
    return {
        "quantization": model.quantization,
        "dtype": model.dtype,
        "attn_implementation": attention,
        "device_map": device_map,
    }


def widen(model: Any) -> None:
    """Make a loaded model compute in float32, on the CPU if its GPU is too small.

    Weights keep their values: 4-bit layers are dequantised as they are in training. Where float32
    fits nowhere, the model stays as it is, and a line says so.
    """
    import torch
    from accelerate.hooks import remove_hook_from_submodules

    sizes = [(_full_size(parameter), parameter) for parameter in model.parameters()]
    more = sum(4 * size - each.numel() * each.element_size() for size, each in sizes)
    whole, memory = 4 * sum(size for size, _ in sizes), FILLED * available_memory()
    on_cpu = input_device(model).type == "cpu"
    gpus = range(0 if on_cpu else torch.cuda.device_count())
    if more > (memory if on_cpu else FILLED * sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)):
        if on_cpu or whole > memory:
            print(f"float32 needs {whole / 1e9:.0f} GB, which do not fit: measured in 16 bits")
            return
        print(f"float32 needs {whole / 1e9:.0f} GB, more than the GPUs have: on the CPU")
        remove_hook_from_submodules(model)  # accelerate's move inputs to a layer's GPU
        model.to("cpu")
    for module in model.modules():
        if hasattr(module._parameters.get("weight"), "quant_state"):  # not of peft's wrapper
            _dequantise(module)
        for buffer in module.buffers(recurse=False):
            if buffer.dtype in (torch.bfloat16, torch.float16):
                buffer.data = buffer.data.float()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()


def compute_in(model: Any, dtype: str) -> None:
    """Make a model in float32 compute in a 16-bit format, as an engine with merged weights does.

    Products sum in float32 and round once. An adapter that is added to a rounded product would be
    lost where it is below half a step, and weights that are cast would be other weights: both stay
    in float32. Rotary frequencies and the like keep their precision.
    """
    import torch

    wanted = getattr(torch, dtype)
    exempt = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    products = torch.nn.Linear, torch.nn.Embedding
    kept: set[int] = set()
    inner: set[int] = set()
    for module in model.modules():
        adapted = hasattr(module, "base_layer")
        if id(module) in inner or not (adapted or isinstance(module, products)):
            continue
        inner |= {id(part) for part in module.modules()}
        kept |= {id(parameter) for parameter in module.parameters()}
        if not hasattr(module, "_rounded_to"):
            module.register_forward_pre_hook(_widen_input)
            module.register_forward_hook(_round_output)
        module._rounded_to = wanted
    for name, parameter in model.named_parameters():
        cast = parameter.is_floating_point() and id(parameter) not in kept
        if cast and not any(each in name for each in exempt):
            parameter.data = parameter.data.to(wanted)


def _widen_input(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.float() if each.is_floating_point() else each for each in inputs)


def _round_output(module: Any, inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):  # a router: weights, and numbers of experts
        return tuple(_round_output(module, inputs, part) for part in output)
    return output.to(module._rounded_to) if output.is_floating_point() else output


def _full_size(parameter: Any) -> int:
    """Return the number of weights, also of a parameter that is packed in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if state is None else state.shape.numel())


def _dequantise(layer: Any) -> None:
    """Make a 4-bit layer multiply with its dequantised weights, in the dtype of its input."""
    from bitsandbytes.functional import dequantize_4bit
    from torch.nn.functional import linear

    weight, bias = dequantize_4bit(layer.weight.data, layer.weight.quant_state), layer.bias

    def forward(x: Any) -> Any:
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    setattr(layer, "_old_forward" if hasattr(layer, "_hf_hook") else "forward", forward)


def input_device(model: Any) -> Any:
    """Return the device for a model's token ids."""
    import torch

    device = model.get_input_embeddings().weight.device
    if device.type == "meta" and hasattr(model, "hf_device_map"):
        # Offloaded: accelerate's hooks move weights and inputs to the device that computes.
        return torch.device("cpu")
    return device


def quantization_config(quantization: Mapping[str, Any], path: Path) -> Any:
    """Return the configuration of a 4-bit model in a folder; `quantization` as in `load_model`."""
    from transformers import BitsAndBytesConfig

    if quantization.get("type") not in ("nf4", "fp4"):
        raise ArtifactError(
            f"quantization {quantization.get('type')!r} is unknown; allowed: nf4, fp4"
        )
    skip = quantization.get("skip") or kept_from_four_bits(path)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization["type"],
        bnb_4bit_use_double_quant=bool(quantization["double_quant"]),
        bnb_4bit_compute_dtype=quantization["compute_dtype"],
        llm_int8_skip_modules=skip,  # the 4-bit loader's too, by its old name
    )


def refuse_gaps(
    path: Path, info: Mapping[str, Any], gaps: Collection[str], *, hint: str = ""
) -> None:
    """Refuse missing and unexpected tensors; transformers only warns and invents missing ones.

    Those in `gaps` may be missing or left over. Raises ArtifactError.
    """
    differences = [
        f"{kind.replace('_', ' ')}: {key}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for key in sorted(map(str, info.get(kind) or ()))
        if key not in gaps
    ]
    if differences:
        raise ArtifactError(
            f"{path}: tensors do not fit the model: {len(differences)} differ, first "
            f"{differences[0]}",
            details=differences[:20],
            hint=hint,
        )


# Adapters, unmerged. Some need more than peft's loader does: the number of embedding rows that they
# were trained with, factors in the layout of the installed peft version, and their stored dtype.


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
