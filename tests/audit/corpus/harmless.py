"""Differences that are no fault: what systems and trainers leave, and layouts that look broken."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.audit import corpus as by
from tests.audit.corpus import ADAPTER, Broken, Corpus, Tensors


def _hidden(root: Path, _: Corpus) -> None:
    """Add what macOS, NFS, the hub, editors and browsers leave beside the files."""
    for path in list(root.iterdir()):
        (root / f"._{path.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
        (root / f"{path.name}:Zone.Identifier").write_text("[ZoneTransfer]")
    for name in (".DS_Store", ".nfs0001", "model.safetensors.lock"):
        (root / name).write_bytes(b"")
    (root / ".#config.json").symlink_to("me@host.1")
    (root / ".cache").mkdir()
    (root / ".cache/model.safetensors.metadata").write_text("1")


def _states_of_trainers(root: Path, _: Corpus) -> None:
    for name in (
        "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scheduler.bin",
        "sampler_1.bin", "pytorch_model_fsdp.bin"
    ):  # fmt: skip
        torch.save({"step": 1}, root / name)


def _one_layer_in_fp8(weights: Tensors) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    weights[key] = weights[key].to(torch.int8)
    weights[f"{key}_scale"] = torch.ones(1, 1).half()


def _wide_parts(weights: Tensors) -> None:
    for key in ("model.layers.0.mlp.gate.weight", "model.layers.0.mixer.A_log"):
        weights[key] = torch.ones(4, 32)
    weights["model.norm.weight"] = weights["model.norm.weight"].float()


def _padding(weights: Tensors) -> None:
    weights["model.embed_tokens.weight"][3] = 0


def _three_labels(weights: Tensors) -> None:
    weights["score.weight"] = torch.ones(3, 32).bfloat16()


def _every_fourth_layer(weights: Tensors) -> None:
    """Leave pairs on the queries of eight layers, and on the values of each fourth."""
    first = {key: tensor for key, tensor in weights.items() if "layers.0." in key}
    weights.clear()
    for layer in range(8):
        for key, tensor in first.items():
            if "q_proj" in key or ("v_proj" in key and layer % 4 == 3):
                weights[key.replace("layers.0.", f"layers.{layer}.")] = tensor


_FP8 = {"quant_method": "fp8", "ignored_layers": ["model.layers.0.mlp.up_proj"]}
_WINDOWS = "FROM model.gguf\r\nPARAMETER stop <|im_end|>\r\nPARAMETER stop <|eot_id|>\r\n"

HARMLESS: dict[str, Broken] = {
    # The code is that which must not be reported; where none is named, no error at all.
    "hidden files": Broken("", "qwen2", _hidden),
    "a Modelfile with Windows line ends": Broken(
        "EXPORT_DIFFERS", "qwen2", by.written("Modelfile", _WINDOWS)),
    "states of trainers": Broken("STRAY_WEIGHT_FILE", "qwen2", _states_of_trainers),
    "a layer that fp8 leaves out": Broken(
        "QUANT_LAYOUT", "llama",
        by.both(by.tensors(_one_layer_in_fp8), by.edited(quantization_config=_FP8))),
    "routers, norms and states in fp32": Broken("DTYPE_DIFFERS", "fp16", by.tensors(_wide_parts)),
    "keys of remote code": Broken(
        "", "llama",
        by.both(by.renamed(lambda key: f"model.vision_tower.{key}"),
                by.edited(architectures=["XyzForCausalLM"], model_type="xyz",
                          auto_map={"A": "b.C"}))),
    "a classifier of three classes": Broken(
        "", "reward",
        by.both(by.tensors(_three_labels),
                by.edited(id2label={str(n): f"L{n}" for n in range(3)}, label2id=None))),
    "a reward adapter with its head beside it": Broken(
        "", "lora",
        by.both(lambda root, _: by.save_head(root),
                by.edited("adapter_config.json", modules_to_save=["v_head"])), base=""),
    "a layer with the name of a head": Broken(
        "HEAD_MISSING", "lora",
        by.both(by.renamed(lambda key: key.replace("q_proj", "classifier"), ADAPTER),
                by.edited("adapter_config.json", target_modules=["classifier", "v_proj"])),
        base=""),
    "a row of padding": Broken("CONSTANT_ROWS", "qwen2", by.tensors(_padding), values=True),
    "pairs on some kinds of layers": Broken(
        "ADAPTER_COVERAGE", "lora",
        by.both(by.tensors(_every_fourth_layer, ADAPTER),
                by.edited("adapter_config.json", target_modules=["q_proj", "v_proj"])), base=""),
}  # fmt: skip
