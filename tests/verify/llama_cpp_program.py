"""Serve a Qwen2 and its adapters by llama.cpp's own server, in an environment of its own.

    llama_cpp_program.py BASE OUT [--neutral] [NAME=ADAPTER ...]

Writes OUT/base.gguf and OUT/<NAME>.gguf from folders of transformers and peft, starts the server on
a free port, and prints its address as the last line. It needs `gguf` and `xllamacpp`, whose wheel
has llama.cpp's server; it ends when its standard input does. Neutral is a server whose defaults
change no distribution, and whose prompt cache, which mixes adapters, is off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from numpy.typing import NDArray

ARCHITECTURE = "qwen2"
_ROW = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a safetensors file in 32 bits; numpy has no bf16."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in about["data_offsets"])
            values = np.frombuffer(data[first:last], _ROW[about["dtype"]])
            if about["dtype"] == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values.reshape(about["shape"]).astype(np.float32)
    return tensors


def write_model(folder: Path, out: Path) -> None:
    """Write a model with its tokenizer and its chat template, in 32 bits."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, ARCHITECTURE)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    write_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, tensor in read_tensors(folder / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
    finish(writer)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any]) -> None:
    """Add a byte-level BPE with the splitting rule of Qwen2."""
    document = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    texts = {number: text for text, number in document["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in document["added_tokens"]}
    numbers = range(config["vocab_size"])
    named = {number: special.get(number) or texts.get(number) for number in numbers}
    kinds = {
        number: gguf.TokenType.CONTROL if number in special
        else gguf.TokenType.UNUSED if named[number] is None
        else gguf.TokenType.NORMAL
        for number in numbers
    }  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([named[number] or f"[PAD{number}]" for number in numbers])
    writer.add_token_types([kinds[number] for number in numbers])
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    by_text = {text: number for number, text in special.items()}
    if settings.get("bos_token"):
        writer.add_bos_token_id(by_text[settings["bos_token"]])
    writer.add_add_bos_token(bool(settings.get("bos_token")))
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def write_adapter(folder: Path, out: Path, layers: int) -> None:
    """Write a LoRA adapter of peft."""
    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(out, ARCHITECTURE)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, layers)
    for name, tensor in read_tensors(folder / "adapter_model.safetensors").items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        weight = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        writer.add_tensor(f"{weight}.lora_{part[0].lower()}", tensor)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the files, start the server, and keep it until standard input ends."""
    base, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((base / "config.json").read_text())
    write_model(base, out / "base.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(out / "base.gguf")
    params.n_ctx, params.n_parallel, params.port = 4 * config["max_position_embeddings"], 4, 0
    params.cpuparams.n_threads = 1
    params.kv_unified = True
    words = sys.argv[3:]
    if words[:1] == ["--neutral"]:
        words = words[1:]
        params.cache_prompt = False
        params.sampling.temp, params.sampling.min_p = 1.0, 0.0
        params.sampling.top_k, params.sampling.top_p = 0, 1.0
    loaded = []
    for name, _, folder in (word.partition("=") for word in words):
        path = out / f"{name}.gguf"
        write_adapter(Path(folder), path, config["num_hidden_layers"])
        loaded.append(xllamacpp.CommonAdapterLoraInfo(str(path), 0.0))
    params.lora_adapters = loaded
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
