"""Variants of small checkpoints: the finding of each fault, and none for harmless differences.

What public reports describe is in `corpus`, as libraries save it; here are the variants that need
no library: two tables of a maker and codes, and tests where a finding has to name a thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.audit.check import Finding
from tasks.audit.run import audit
from tests.audit.making import (
    SIZES,
    Arrays,
    adapter_tensors,
    codes,
    edit_json,
    errors,
    make_adapter,
    make_model,
    make_shards,
    tensors,
    with_tokenizer,
    wrapped,
    write_json,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
ROWS = SIZES["vocab_size"]
V_HEAD = {"v_head.summary.weight": np.ones((1, 16), np.float32)}
CLASSIFIER = ["LlamaForSequenceClassification"]

Make = Callable[[Path], Path]
Change = Callable[[Arrays], Any]
After = Callable[[Path], Any]


def _maker(make: Any, arrays: Arrays, after: After | None, settings: dict[str, Any]) -> Make:
    def write(root: Path) -> Path:
        folder: Path = make(root / "it", arrays=arrays, **settings)
        if after:
            after(folder)
        return folder

    return write


def model(change: Change | None = None, after: After | None = None, **config: Any) -> Make:
    """Return the maker of a model: with changed tensors and settings, then with changed files."""
    arrays = tensors()
    return _maker(make_model, (change(arrays) or arrays) if change else arrays, after, config)


def shards(after: After | None = None, **config: Any) -> Make:
    """Return the maker of a model in three files with their index."""
    return _maker(make_shards, tensors(), after, config)


def adapter(change: Change | None = None, after: After | None = None, **settings: Any) -> Make:
    """Return the maker of an adapter."""
    arrays = adapter_tensors()
    return _maker(make_adapter, (change(arrays) or arrays) if change else arrays, after, settings)


def trunk(arrays: Arrays) -> Arrays:
    return {key: array for key, array in arrays.items() if key != HEAD}


def scored(rows: int = 1, name: str = "score") -> Change:
    """Put a classifier's head in place of the language model's."""
    return lambda arrays: {**trunk(arrays), f"{name}.weight": np.ones((rows, 16), np.float32)}


def named(change: Callable[[str], str]) -> Change:
    return lambda arrays: {change(key): array for key, array in arrays.items()}


def put(**changes: Any) -> Change:
    """Set values of tensors: a number, or a pair of an index and a number."""
    keys = {"embed": EMBED, "head": HEAD, "up": UP, "norm": "model.norm.weight",
            "down": "model.layers.0.mlp.down_proj.weight"}  # fmt: skip

    def change(arrays: Arrays) -> None:
        for name, value in changes.items():
            index, number = value if isinstance(value, tuple) else (slice(None), value)
            arrays[keys[name]][index] = number

    return change


def index(change: Callable[[dict[str, str]], dict[str, Any]]) -> After:
    """Change the table of an index."""

    def edit(root: Path) -> None:
        table = json.loads((root / INDEX).read_text())["weight_map"]
        edit_json(root / INDEX, weight_map=change(table))

    return edit


def beside(name: str, arrays: Arrays | None = None) -> After:
    """Add a safetensors file, of a value head if nothing else is said."""
    return lambda root: save_file(V_HEAD if arrays is None else arrays, root / name)


def text(name: str, content: str) -> After:
    return lambda root: (root / name).write_text(content)


def _two_files_with_one_tensor(root: Path) -> None:
    arrays = tensors()
    part = {name: arrays[name] for name in list(arrays)[::3]}
    more = {name: arrays[name] for name in list(arrays)[1:2]}
    save_file({**part, **more}, root / "model-00001-of-00003.safetensors")


def _no_index_and_a_shard_gone(root: Path) -> None:
    (root / INDEX).unlink()
    (root / "model-00003-of-00003.safetensors").unlink()


def _half_rank(arrays: Arrays) -> None:
    at = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    arrays[f"{at}A.weight"] = arrays[f"{at}A.weight"][:2]
    arrays[f"{at}B.weight"] = np.ascontiguousarray(arrays[f"{at}B.weight"][:, :2])


REWARD: dict[str, Any] = {"architectures": ["RewardModel"], "num_labels": 1}
OPENRLHF = {"base_model_class": "RewardModel", "parent_library": "openrlhf.models.model"}

BROKEN: dict[str, tuple[Make, dict[str, str]]] = {
    # Files and their index
    "a tensor that the index does not name": (
        shards(index(lambda table: {k: v for k, v in table.items() if k != HEAD})),
        {"INDEX_WRONG": "error"}
    ),
    "a tensor in two files": (shards(_two_files_with_one_tensor), {"INDEX_WRONG": "error"}),
    "an index that is no index": (
        shards(text(INDEX, '{"weight_map": 3}')), {"INDEX_WRONG": "error"}
    ),
    "an index that leads out of the folder": (
        shards(index(lambda table: {**table, HEAD: "../other/model.safetensors"})),
        {"UNSAFE_FILE": "error"}
    ),
    "no index and a shard gone": (
        shards(_no_index_and_a_shard_gone),
        {"INDEX_WRONG": "error"}
    ),
    "a single file beside an index": (
        shards(beside(WEIGHTS, tensors(1))), {"INDEX_WRONG": "warning"}
    ),
    "a consolidated file, the only one that vLLM reads": (
        shards(beside("consolidated.safetensors")), {"STRAY_WEIGHT_FILE": "error"}
    ),
    "no configuration": (
        model(after=lambda root: (root / "config.json").unlink()), {"FILE_MISSING": "error"}
    ),
    "a pointer of git LFS": (
        model(None, text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n")),
        {"BAD_HEADER": "error"}
    ),
    **{
        f"a damaged {name}": (model(after=text(name, "{")), {"JSON_UNREADABLE": "error"})
        for name in ("processor_config.json", "preprocessor_config.json", "chat_template.json")
    },
    # Heads
    "a critic of OpenRLHF": (
        model(scored(), architectures=["CriticModel"], num_labels=1), {"HEAD_UNUSABLE": "error"}
    ),
    "an empty head": (
        model(lambda a: {**trunk(a), "score.weight": np.ones(0, np.float32)},
              architectures=CLASSIFIER, num_labels=1),
        {"EMPTY_TENSOR": "error", "HEAD_UNUSABLE": "error"}
    ),
    "constant rows": (model(put(up=(5, 0.25))), {"CONSTANT_ROWS": "warning"}),
    "a reward adapter of OpenRLHF without its head": (
        adapter(task_type=None, auto_mapping=OPENRLHF), {"HEAD_MISSING": "error"}
    ),
}  # fmt: skip


def _hidden(root: Path) -> None:
    """Add what macOS, NFS, the hub, editors and browsers leave beside the files."""
    for path in list(root.iterdir()):
        (root / f"._{path.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
        (root / f"{path.name}:Zone.Identifier").write_text("[ZoneTransfer]")
    for name in (".DS_Store", ".nfs0001", "model.safetensors.lock"):
        (root / name).write_bytes(b"")
    (root / ".#config.json").symlink_to("me@host.1")
    (root / ".cache").mkdir()
    (root / ".cache/model.safetensors.metadata").write_text("1")


def _modelfile(root: Path) -> None:
    """Add the Modelfile of an editor on Windows, with a mark of the template and one of others."""
    text = "FROM model.gguf\r\nPARAMETER stop <|im_end|>\r\nPARAMETER stop <|eot_id|>\r\n"
    (root / "Modelfile").write_bytes(text.encode())


def _states_of_trainers(root: Path) -> None:
    import torch

    for name in (
        "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scheduler.bin",
        "sampler_1.bin", "pytorch_model_fsdp.bin"
    ):  # fmt: skip
        torch.save({"step": 1}, root / name)


def _packed(key: str, dtype: Any, suffix: str) -> Change:
    def change(arrays: Arrays) -> None:
        for name in [name for name in arrays if key in name]:
            arrays[name] = arrays[name].astype(dtype)
            arrays[name.replace(".weight", suffix)] = np.ones((1, 1), np.float16)

    return change


def _mixed(arrays: Arrays) -> Arrays:
    arrays = {key: array.astype(np.float16) for key, array in arrays.items()}
    wide = {"model.layers.0.mlp.gate.weight": (4, 16), "model.layers.0.mixer.A_log": (4, 16)}
    arrays |= {key: np.ones(shape, np.float32) for key, shape in wide.items()}
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float32)
    return arrays


def _every_fourth_layer(arrays: Arrays) -> Arrays:
    """Return pairs on the queries of all layers, and on the values of each fourth."""
    return {
        key.replace("layers.0", f"layers.{layer}"): array
        for layer in range(8)
        for key, array in arrays.items()
        if "layers.0" in key and (layer % 4 == 3 or "q_proj" in key)
    }


FINE: dict[str, tuple[Make, set[str]]] = {
    # Makers, and codes that the checkpoint must not have; where none is named, no error at all.
    "hidden files": (model(after=_hidden), set()),
    "a Modelfile with Windows line ends": (model(after=_modelfile), {"EXPORT_DIFFERS"}),
    "a layer that fp8 leaves out": (
        model(_packed("layers.1.mlp.up_proj", np.int8, ".weight_scale"), quantization_config={
            "quant_method": "fp8", "ignored_layers": ["model.layers.0.mlp.up_proj"]}),
        {"QUANT_LAYOUT"}
    ),
    "states of trainers": (model(after=_states_of_trainers), {"STRAY_WEIGHT_FILE"}),
    "packed weights with their scales": (
        model(_packed("_proj", np.int8, ".weight_scale"),
              quantization_config={"quant_method": "compressed-tensors"}),
        {"DTYPE_DIFFERS", "QUANT_CONFIG"}
    ),
    "routers, norms and states in fp32": (model(_mixed, dtype="float16"), {"DTYPE_DIFFERS"}),
    "keys of remote code": (
        model(named(lambda key: f"model.vision_tower.{key}"), architectures=["XyzForCausalLM"],
              model_type="xyz", auto_map={"A": "b.C"}),
        set()
    ),
    "a classifier of three classes": (
        model(scored(3), architectures=CLASSIFIER, id2label={str(n): f"L{n}" for n in range(3)}),
        set()
    ),
    "a reward adapter with its head beside it": (
        adapter(after=beside("value_head.safetensors"), modules_to_save=["v_head"]), set()
    ),
    "a row of padding": (model(put(embed=(3, 0)), pad_token_id=3), {"CONSTANT_ROWS"}),
    "pairs on some kinds of layers": (adapter(_every_fourth_layer), {"ADAPTER_COVERAGE"}),
    "a rank by a pattern": (
        adapter(_half_rank, rank_pattern={"layers.1.self_attn.q_proj": 2}), {"ADAPTER_PAIRS"}
    ),
}  # fmt: skip


def test_every_fault_has_its_finding(tmp_path: Path) -> None:
    wrong = []
    for number, (name, (make, expected)) in enumerate(BROKEN.items()):
        reported = codes(make(tmp_path / str(number)))
        actual = {code: reported.get(code) for code in expected}
        if actual != expected or "CANNOT_JUDGE" in reported:
            wrong.append((name, actual, sorted(reported)))
    assert wrong == [], wrong


def test_harmless_differences_have_none(tmp_path: Path) -> None:
    wrong = []
    for number, (name, (make, absent)) in enumerate(FINE.items()):
        reported = codes(make(tmp_path / str(number)))
        unexpected = absent & reported.keys() if absent else errors(reported)
        if unexpected:
            wrong.append((name, sorted(unexpected)))
    assert wrong == [], wrong


def with_code(root: Path, code: str, **options: Any) -> list[Finding]:
    return [finding for finding in audit(root, **options).findings if finding.code == code]


def test_values_are_named_and_read_unless_declined(tmp_path: Path) -> None:
    root = model(put(up=([1, 3], np.nan), embed=([7, 9], 0), head=([7, 9], 0)))(tmp_path)
    assert errors(codes(root, values=False)) == set()
    (finding,) = with_code(root, "NOT_FINITE")
    assert (finding.tensor, finding.found.split()[0]) == (UP, "32")
    (finding,) = with_code(root, "CONSTANT_ROWS")
    assert finding.found.endswith(": 7, 9")
    assert (EMBED in finding.tensor, HEAD in finding.tensor) == (True, True)


def test_one_cause_has_one_finding(tmp_path: Path) -> None:
    base = with_tokenizer(make_model(tmp_path / "base"))
    trained = {key: array * 1.01 for key, array in tensors().items()}
    lost = {key: array for key, array in trained.items() if "layers.1." not in key}
    for name, arrays, eos, expected in (
        ("lost", lost, 2, "TENSOR_MISSING"),
        ("module", wrapped(trained), 2, "WRAPPER_RESIDUE"),
        ("peft", wrapped(trained, "base_model.model."), 2, "PEFT_RESIDUE"),
        ("eos", trained, 7, "EOS_DISAGREES"),
    ):
        root = with_tokenizer(make_model(tmp_path / name, arrays, eos_token_id=eos))
        edit_json(root / "generation_config.json", eos_token_id=eos)
        worse = [f.code for f in audit(root, base=base).findings if f.severity != "info"]
        assert worse == [expected], name


def test_an_untrained_adapter_is_an_error_without_an_option(tmp_path: Path) -> None:
    zero = {key: array * ("lora_A" in key) for key, array in adapter_tensors().items()}
    assert errors(codes(make_adapter(tmp_path / "it", zero))) == {"LORA_B_ZERO"}
    assert errors(codes(tmp_path / "it", values=False)) == set()
    halves = {key: array * ("lora_B" in key) for key, array in adapter_tensors().items()}
    assert errors(codes(make_adapter(tmp_path / "a", halves))) == {"LORA_B_ZERO"}
    first = next(key for key in adapter_tensors() if "lora_B" in key)
    some = {**adapter_tensors(), first: np.zeros_like(adapter_tensors()[first])}
    assert codes(make_adapter(tmp_path / "some", some))["LORA_B_ZERO"] == "warning"
    magnitude = first.replace("lora_B.weight", "lora_magnitude_vector")
    dora = {**adapter_tensors(), magnitude: np.zeros(len(some[first]), np.float32)}
    assert codes(make_adapter(tmp_path / "dora", dora))["LORA_B_ZERO"] == "error"


def test_a_gguf_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3" + b"\0" * 19)
    report = audit(tmp_path)
    assert (report.kind, report.ok, list(codes(tmp_path))) == ("foreign", True, ["FOREIGN_FORMAT"])


def test_data_against_the_manifest(tmp_path: Path) -> None:
    from tasks.pipeline.artifact import Origin, publish

    root = tmp_path / "artifact"
    publish(shards()(tmp_path), root, Origin("weights", "merge", "key"))
    assert errors(codes(root, values=True)) == set()
    file = root / "model-00002-of-00003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert errors(codes(root, values=True)) == {"SHA256_DIFFERS"}
    (root / "added.txt").write_text("later")
    assert codes(root)["MANIFEST_DIFFERS"] == "error"


def test_a_trainers_folder_names_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (500, 1000):
        make_adapter(tmp_path / f"checkpoint-{step}")
    (finding,) = audit(tmp_path).findings
    assert finding.code == "NOTHING_HERE"
    assert finding.fix.endswith(f"source={tmp_path}/checkpoint-1000")


def tokenizer(*added: dict[str, Any], **settings: Any) -> After:
    """Add a tokenizer with an id for every row of the tiny model, and more tokens."""

    def write(root: Path) -> None:
        vocabulary = {f"t{number}": number for number in range(ROWS)}
        document = {"added_tokens": list(added), "model": {"type": "BPE", "vocab": vocabulary}}
        write_json(root / "tokenizer.json", document)
        config = {"eos_token": "t2", "chat_template": "{{ messages }}", **settings}
        config = {key: value for key, value in config.items() if value is not None}
        write_json(root / "tokenizer_config.json", config)
        write_json(root / "generation_config.json", {"eos_token_id": 2})

    return write


def _token(text: str, *, special: bool = True) -> dict[str, Any]:
    return {"id": ROWS, "content": text, "special": special}


TOKENS: dict[str, tuple[After, dict[str, str]]] = {
    "as many as rows": (tokenizer(), {}),
    "an unused one beyond the rows": (tokenizer(_token("<image>")), {"TOKENIZER_ROWS": "warning"}),
    "padding beyond the rows": (
        tokenizer(_token("[PAD]"), pad_token={"content": "[PAD]"}), {"TOKENIZER_ROWS": "error"}
    ),
    "an ordinary one beyond the rows": (
        tokenizer(_token("<tool>", special=False)), {"TOKENIZER_ROWS": "error"}
    ),
    "of a class that knows its end": (tokenizer(eos_token=None), {}),
}  # fmt: skip


def test_tokens_beyond_the_rows(tmp_path: Path) -> None:
    for number, (name, (after, expected)) in enumerate(TOKENS.items()):
        assert codes(model(after=after)(tmp_path / str(number))) == expected, name
    several = model(after=tokenizer(eos_token="t5"), eos_token_id=[2, 5])(tmp_path / "several")
    edit_json(several / "generation_config.json", eos_token_id=[5, 2])
    assert codes(several) == {}


@pytest.mark.parametrize("where", ["hf_quant_config.json", "compression_config", "text_config"])
def test_quantisation_declared_in_another_place(where: str, tmp_path: Path) -> None:
    """NVIDIA's exports, llm-compressor's early ones, multimodal models."""

    def pack(arrays: Arrays) -> None:
        for key in [key for key in arrays if key.endswith("_proj.weight")]:
            arrays[key] = arrays[key][:, : arrays[key].shape[1] // 2].astype(np.uint8)
            arrays[key.replace(".weight", ".weight_scale")] = np.ones((1, 1), np.float32)

    root = model(pack, after=tokenizer())(tmp_path)
    assert "QUANT_CONFIG" in errors(codes(root))
    quantization = {"quant_method": "modelopt"}
    if where.endswith(".json"):
        write_json(root / where, {"quantization": {"quant_algo": "NVFP4"}})
    elif where == "text_config":
        edit_json(root / "config.json", text_config={"quantization_config": quantization})
    else:
        edit_json(root / "config.json", compression_config=quantization)
    assert errors(codes(root)) == set()
