"""Describe a model: the tensors of its checkpoints, its parameters in memory, and how they map.

    model = model_facts(folder)          from config.json and the checkpoint's headers
    model.slots                          position in memory of every tensor on disk
    model.findings                       tensors that are missing, unexpected, of another shape

The class is built on the meta device, and transformers' own conversion (`mapping.py`) maps its
names to keys on disk, so names and shapes are those of the library that loads the checkpoint.
Families in the table below have the same names on disk and in memory; for them config.json is
enough, which takes microseconds instead of seconds. Call `model_facts` through
a `Perform`, where a warm process can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple

from tasks.core.contract import Expected
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.reader import WEIGHTS, index_of, read_checkpoint
from tasks.weights.files.tensors import Tensors
from tasks.weights.mapping import Mapped, Shape, Shapes, Slot, default_layout, trace
from tasks.weights.model_class import meta_model, other_towers, oversized, quantized_names
from tasks.weights.pickled.torch_file import is_pickled_model, read_model
from tasks.weights.quantized.config_fields import is_decodable, without_quantization
from tasks.weights.quantized.packed import read_base

LINEAR, CONV1D, EMBEDDING, OTHER = "linear", "conv1d", "embedding", "other"
"""Kinds of modules: "conv1d" is GPT-2's linear layer, weights (in, out)."""
_SINGLE = f"{WEIGHTS}.safetensors"


@dataclass(frozen=True)
class Model:
    """A model in memory, and one layout of its checkpoints."""

    parameters: Shapes  # shape of every parameter by its name in memory; a tied one under each name
    modules: Mapping[str, str]  # kind of every module, by name, in the model's order
    ties: Mapping[str, str]  # name of a tied parameter -> name of the parameter that it shares
    # Modules with 3-D parameters of shape (experts, in, out)
    transposed: frozenset[str] = frozenset()
    input_embedding: str = ""  # module name; "" if there is none
    output_embedding: str = ""  # module name; "" if there is none, as in a reward model
    # Parameters that no text passes, which training leaves as they are
    towers: tuple[str, ...] = ()
    slots: tuple[Slot, ...] = ()  # position in memory of every tensor on disk
    # Every tensor that a checkpoint must contain, by key; a tied one once
    tensors: tuple[Expected, ...] = ()
    # Key that a checkpoint may leave out -> key that stores the same tensor
    tied: Mapping[str, str] = field(default_factory=dict)
    # Name of a tied parameter -> its key, if a checkpoint stores it separately
    aliases: Mapping[str, str] = field(default_factory=dict)
    embedding: str = ""  # key of the input embedding, (vocabulary, hidden)
    quantized: tuple[str, ...] = ()  # keys of weights that transformers can load in 4 bits
    unread: tuple[str, ...] = ()  # keys on disk that the model ignores
    findings: tuple[str, ...] = ()  # problems of the checkpoint whose keys were given; see `Mapped`

    @property
    def wide(self) -> frozenset[str]:
        """Keys of tensors that the model's class keeps in float32, as DeepSeek's router biases."""
        return frozenset(tensor.name for tensor in self.tensors if tensor.dtype == "F32")

    def partners(self, name: str) -> frozenset[str]:
        """Return all names of the parameter `name`, its own included."""
        holder = self.ties.get(name, name)
        return frozenset({holder, *(alias for alias, to in self.ties.items() if to == holder)})


def model_facts(folder: Path, dtype: str = "bfloat16", disk: Shapes | None = None) -> Model:
    """Describe the model of a folder's config.json.

    Raises ArtifactError if config.json cannot be read or describes no class that is installed, or
    the folder's checkpoint cannot be read.

    Args:
        dtype: torch name of the dtype of the parameters.
        disk: shape by key of the tensors of a checkpoint, after any decoding. None reads the
            headers of the checkpoint in the folder; without one, the layout of `save_pretrained`
            is used.
    """
    config, disk = _config_and_shapes(folder, disk)
    return plain_model(config, dtype, disk) or facts_of(meta_model(folder, dtype), disk)


def known_facts(folder: Path, dtype: str, disk: Shapes | None = None) -> Model | None:
    """Return the same without importing transformers; None if transformers is needed."""
    config, disk = _config_and_shapes(folder, disk)
    return plain_model(config, dtype, disk)


def _config_and_shapes(
    folder: Path, disk: Shapes | None
) -> tuple[Mapping[str, Any], Shapes | None]:
    """Return config.json of the decoded model, and the shapes of its tensors on disk."""
    config = read_json(folder / "config.json")
    packed = is_decodable(config)
    if disk is None:
        source: Tensors | None = None
        if is_pickled_model(folder):
            source = read_model(folder)
        elif any((folder / name).is_file() for name in (_SINGLE, index_of(_SINGLE))):
            source = read_base(folder) if packed else read_checkpoint(folder)
        if source is not None:
            disk = {name: tuple(info.shape) for name, info in source.items()}
    return (without_quantization(config) if packed else config), disk


def live_model(model: Any) -> Model:
    """Describe a transformers model without any checkpoint."""
    parameters = model.named_parameters(remove_duplicate=False)
    modules = {name: module for name, module in model.named_modules() if name}
    return Model(
        {name: tuple(tensor.shape) for name, tensor in parameters},
        {name: _kind(module) for name, module in modules.items()},
        {str(alias): str(to) for alias, to in model.all_tied_weights_keys.items()},
        frozenset(n for n, module in modules.items() if getattr(module, "is_transposed", False)),
        _name_of(model, model.get_input_embeddings()),
        _name_of(model, model.get_output_embeddings()),
    )


def facts_of(model: Any, disk: Shapes | None = None) -> Model:
    """Describe a transformers model and a layout of its checkpoints."""
    mapped = trace(model, default_layout(model) if disk is None else disk)
    embedding = f"{_name_of(model, model.get_input_embeddings())}.weight"
    keys = _keys_of(model, mapped, embedding)
    tied = {keys[alias]: keys[to] for alias, to in model.all_tied_weights_keys.items()}
    names = {f"torch.{text}": short for text, short in DTYPE_NAMES.items()}
    wide = model._keep_in_fp32_modules_strict or ()  # as `from_pretrained` applies it
    dtypes = {
        name: "F32" if any(part in name for part in wide) else names.get(str(tensor.dtype))
        for name, tensor in model.state_dict().items()
    }
    shapes = {slot.key: (slot.shape, dtypes[slot.live]) for slot in mapped.slots}
    shapes |= {key: (shape, None) for key, shape in {**mapped.unread, **mapped.missing}.items()}
    quantized = set(quantized_names(model))
    towers = tuple(f"{module}." for module in other_towers(model))
    return replace(
        live_model(model),
        towers=tuple(name for name in model.state_dict() if towers and name.startswith(towers)),
        slots=mapped.slots,
        tensors=tuple(Expected(key, *rest) for key, rest in shapes.items() if key not in tied),
        tied=tied,
        aliases={alias: keys[alias] for alias in model.all_tied_weights_keys},
        embedding=keys[embedding],
        quantized=tuple(slot.key for slot in mapped.slots if slot.live in quantized),
        unread=tuple(mapped.unread),
        findings=mapped.findings,
    )


def _kind(module: Any) -> str:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    kinds = {nn.Linear: LINEAR, Conv1D: CONV1D, nn.Embedding: EMBEDDING}
    return next((kind for cls, kind in kinds.items() if isinstance(module, cls)), OTHER)


def _name_of(model: Any, wanted: Any) -> str:
    names = (name for name, module in model.named_modules() if module is wanted)
    return next(names, "") if wanted is not None else ""


def _keys_of(model: Any, mapped: Mapped, embedding: str) -> dict[str, str]:
    """Return the key on disk by live name, for tensors stored unsplit and for all tied ones."""
    keys = {slot.live: slot.key for slot in mapped.slots if slot.is_all}
    ties, state = model.all_tied_weights_keys, model.state_dict()
    # A checkpoint may lack these tensors (a finding), but their keys are needed all the same.
    for name in {*ties, *ties.values(), embedding} - set(keys):
        keys[name] = next(iter(default_layout(model, {name: tuple(state[name].shape)})))
    return keys


# Families whose config.json is enough.


def _attention(*, biased: bool = False) -> dict[str, str]:
    shapes = {}
    for name, rows in (("q", "q"), ("k", "kv"), ("v", "kv")):
        shapes[f"self_attn.{name}_proj.weight"] = f"{rows} h"
        if biased:
            shapes[f"self_attn.{name}_proj.bias"] = rows
    return {**shapes, "self_attn.o_proj.weight": "h q"}


_ATTENTION = _attention()
_HEAD_NORMS = {"self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"}
_MLP = {"mlp.gate_proj.weight": "f h", "mlp.up_proj.weight": "f h", "mlp.down_proj.weight": "h f"}
_NORMS = {"input_layernorm.weight": "h", "post_attention_layernorm.weight": "h"}
_AROUND = {
    "pre_feedforward_layernorm.weight": "h",
    "post_feedforward_layernorm.weight": "h",
}
_LAYERS: Mapping[str, Mapping[str, str]] = {
    # architecture -> tensors of a layer in the model's order -> shape in symbols (see `_sizes`)
    "LlamaForCausalLM": {**_ATTENTION, **_MLP, **_NORMS},
    "MistralForCausalLM": {**_ATTENTION, **_MLP, **_NORMS},
    "Qwen2ForCausalLM": {**_attention(biased=True), **_MLP, **_NORMS},
    "Qwen3ForCausalLM": {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_NORMS},
    "Gemma2ForCausalLM": {**_ATTENTION, **_MLP, **_NORMS, **_AROUND},
    "Gemma3ForCausalLM": {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_NORMS, **_AROUND},
    "Phi3ForCausalLM": {
        "self_attn.o_proj.weight": "h q",
        "self_attn.qkv_proj.weight": "qkv h",
        "mlp.gate_up_proj.weight": "2f h",
        "mlp.down_proj.weight": "h f",
        **_NORMS,
    },
}
_OWN_HEAD_SIZE = ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Architectures with a default `head_dim` of their own: config.json has to state it."""
_FORBIDDEN = ("attention_bias", "mlp_bias", "quantization_config", "auto_map")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def plain_model(config: Mapping[str, Any], dtype: str, disk: Shapes | None) -> Model | None:
    """Describe a causal language model of a family in the table, from config.json alone.

    Arguments are as for `model_facts`; `disk` is None for no checkpoint. Returns None if
    transformers has to be asked, which then also reports what is wrong: another family, sizes that
    config.json does not state, optional biases, any unexpected or missing tensor.
    """
    shapes = _shapes(config)
    if shapes is None:
        return None
    ties = {_HEAD: _EMBEDDING} if config["tie_word_embeddings"] else {}
    stored = {name: shape for name, shape in shapes.items() if name not in ties}
    if disk is not None:
        if {**shapes, **disk} != shapes or not set(stored) <= set(disk):
            return None
        stored = dict(disk)
    short = DTYPE_NAMES.get(dtype)
    return Model(
        parameters=shapes,
        modules=dict(_modules(shapes)),
        ties=ties,
        input_embedding=_EMBEDDING.removesuffix(".weight"),
        output_embedding=_HEAD.removesuffix(".weight"),
        slots=tuple(Slot(name, shape, name, shape) for name, shape in stored.items()),
        tensors=tuple(Expected(n, s, short) for n, s in stored.items() if n not in ties),
        tied=ties,
        aliases={alias: alias for alias in ties},
        embedding=_EMBEDDING,
        quantized=tuple(name for name in stored if name.endswith("_proj.weight")),
    )


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Return the shapes of all parameters, in the model's order; None if they are not known."""
    architecture = (config.get("architectures") or [""])[0]
    layer = _LAYERS.get(architecture)
    sizes = _sizes(config, architecture)
    if layer is None or sizes is None or any(config.get(name) for name in _FORBIDDEN):
        return None
    if not isinstance(config.get("tie_word_embeddings"), bool):
        return None
    rows, hidden = config["vocab_size"], sizes["h"]
    shapes: dict[str, Shape] = {_EMBEDDING: (rows, hidden)}
    for index in range(config["num_hidden_layers"]):
        for name, symbols in layer.items():
            shape = tuple(sizes[symbol] for symbol in symbols.split())
            shapes[f"model.layers.{index}.{name}"] = shape
    return {**shapes, "model.norm.weight": (hidden,), _HEAD: (rows, hidden)}


def _sizes(config: Mapping[str, Any], architecture: str) -> dict[str, int] | None:
    """Return the sizes that the symbols of `_LAYERS` stand for; None if they are not known."""
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "num_hidden_layers", "vocab_size",
    )  # fmt: skip
    values = [config.get(name) for name in names]
    if oversized(config) or not all(type(value) is int and value > 0 for value in values):
        return None
    hidden, inner, heads, key_heads = (config[name] for name in names[:4])
    size = config.get("head_dim")
    if size is None and architecture not in _OWN_HEAD_SIZE and hidden % heads == 0:
        size = hidden // heads
    if type(size) is not int:
        return None
    queries, keys = heads * size, key_heads * size
    qkv = queries + 2 * keys
    return {"h": hidden, "f": inner, "2f": 2 * inner, "d": size, "q": queries, "kv": keys,
            "qkv": qkv}  # fmt: skip


def _modules(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield (name, kind) of every module with a tensor, parents before children.

    Modules without tensors, such as activations, are left out: they cannot be trained.
    """
    for name, shape in shapes.items():
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts)):
            yield ".".join(parts[:depth]), OTHER
        matrix = EMBEDDING if name == _EMBEDDING else LINEAR
        if name.endswith(".weight"):
            yield ".".join(parts), matrix if len(shape) == 2 else OTHER


# Where such work is done.

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Perform(Protocol):
    """Calls a module-level function here, or in a warm child process that has torch imported.

    Arguments and result can be pickled. Importing torch and transformers takes 10 s, the work
    itself often milliseconds: `ReferenceScorer.perform` calls in the child, `perform` here.
    """

    def __call__(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T: ...


def perform(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Call the function in this process."""
    return function(*arguments)
