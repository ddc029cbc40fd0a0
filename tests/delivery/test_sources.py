"""Every kind of SOURCE is delivered as it was trained: peft's merge, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.pipeline.artifact import open_artifact, verify
from tests.audit.making import codes
from tests.delivery import making
from tests.delivery.conftest import Done
from tests.delivery.making import INDEX, Tensors, differing, merged_by_peft, rename
from tests.weights.adapters.making import quiet
from tests.weights.deepspeed.test_partitions_property import write as write_zero
from tests.weights.heads.making import change_config, save_llamafactory
from tests.weights.making import Spread, make_base, save_tokenizer, state_of, trained_model
from tests.weights.quantized.making import pack, scale_fp8

Run = Callable[..., Done]
BASE = "merge.base=original"
ADAPTER = "adapter_model"


def is_whole(out: Path) -> None:
    """Check that transformers loads all of it, and that the artifact is as its manifest says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, info = AutoModelForCausalLM.from_pretrained(
        out, local_files_only=True, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoTokenizer.from_pretrained(out, local_files_only=True).chat_template
    assert verify(open_artifact(out, "served")) == []
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


@dataclass
class Place:
    """Folders that a source is made from, and where it is written."""

    root: Path
    base: Path
    ours: Path
    adapter: Path
    shards: Path
    trained: Any
    merged: Tensors


@dataclass
class Case:
    """Arguments of a delivery, its stages, its tensors, and codes that the audit has to report."""

    arguments: list[str]
    stages: list[str]
    wanted: Tensors
    codes: set[str] = field(default_factory=set)


def _trainer(save: Callable[[Any, Path], None], name: str, *codes: str) -> Callable[[Place], Case]:
    """Make a case of an adapter that a trainer saved in a folder of this name."""

    def make(place: Place) -> Case:
        source = place.root / "checkpoints" / name
        save(place.trained, source)
        rounded = save is making.openrlhf_zero3  # its tensors are rounded to 16 bits
        wanted = merged_by_peft(place.base, source) if rounded else place.merged
        arguments = [f"source={source}", f"base={place.base}", BASE]
        return Case(arguments, ["merge", "convert"], wanted, set(codes))

    return make


def _bin_files(place: Place) -> Path:
    """Save the base as transformers 4 does with `safe_serialization=False`."""
    ignored = shutil.ignore_patterns("*.safetensors*")
    folder = Path(shutil.copytree(place.base, place.root / place.base.name, ignore=ignored))
    state = list(state_of(place.base).items())
    weight_map = {}
    for number, part in enumerate((state[::2], state[1::2]), 1):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save(dict(part), folder / name)
        weight_map |= {key: name for key, _ in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def _full_in_bin_files(place: Place) -> Case:
    return Case([f"source={_bin_files(place)}"], ["convert"], state_of(place.base))


def _base_in_bin_files(place: Place) -> Case:
    arguments = [f"source={place.adapter}", f"base={_bin_files(place)}", BASE]
    return Case(arguments, ["merge", "convert"], place.merged)


def _our_shards(place: Place) -> Case:
    arguments = [f"source={place.shards}", f"base={place.ours}"]
    return Case(arguments, ["gather", "merge", "convert"], place.merged)


def _our_full_shards(place: Place) -> Case:
    from tests.weights.making import write_trained

    spread = Spread(world_size=2, full=True)
    source = write_trained(place.root / "full", open_artifact(place.ours), spread)
    wanted = trained_model(place.ours, spread, 1).state_dict()
    return Case([f"source={source}", f"base={place.ours}"], ["gather", "convert"], wanted)


def _deepspeed(stage: int) -> Callable[[Place], Case]:
    """Make a case of a full fine-tuning in DeepSpeed's layout; `test_zero.py` uses DeepSpeed."""

    def make(place: Place) -> Case:
        generator = torch.Generator().manual_seed(2)
        trained = {
            name: tensor.float() + torch.randn(tensor.shape, generator=generator) * 0.05
            for name, tensor in state_of(place.base).items()
        }
        source = place.root / "zero"
        write_zero(source, [trained], stage, 3, 2)
        shutil.copy(place.base / "config.json", source)
        wanted = {name: tensor.bfloat16() for name, tensor in trained.items()}
        return Case([f"source={source}", f"base={place.base}"], ["gather", "convert"], wanted)

    return make


def _sixteen_bits(place: Place, shard: str) -> Path:
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(place.base)
        model.save_pretrained(place.root / "hub", max_shard_size=shard)
    return place.root / "hub"


def _unsloth(shard: str) -> Callable[[Place], Case]:
    def make(place: Place) -> Case:
        source = place.root / "merged_16bit"
        making.unsloth_merged(place.merged, _sixteen_bits(place, shard), source)
        return Case([f"source={source}"], ["convert"], place.merged, {"GENERATION_CONFIG_MISSING"})

    return make


def _packed_base(place: Place) -> Case:
    """bitsandbytes' 4 bits, which an adapter of QLoRA is merged into as it saw them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    packed, source = place.root / "packed", place.root / "adapter"
    pack(place.base, packed)
    save_tokenizer(packed)
    trained_model(packed, Spread(), 3).save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(packed).dequantize().float()
    state = PeftModel.from_pretrained(model, source).merge_and_unload().state_dict()
    wanted = {name: tensor.bfloat16() for name, tensor in state.items()}
    return Case([f"source={source}", f"base={packed}"], ["merge", "convert"], wanted)


def _packed_model(place: Place) -> Case:
    packed = place.root / "packed"
    wanted = pack(place.base, packed)
    save_tokenizer(packed)
    return Case([f"source={packed}"], ["convert"], wanted)


def _fp8_experts(place: Place) -> Case:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fp8, source, decoded = (place.root / name for name in ("fp8", "adapter", "decoded"))
    base = make_base(place.root / "plain", "mixtral").path
    exact = scale_fp8(base, fp8, "deepseek")
    spread = Spread(parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    trained_model(fp8, spread, 3).save_pretrained(source)
    assert "BASE_QUANTISED" not in codes(source, base=fp8)
    decoded.mkdir()
    shutil.copy(base / "config.json", decoded)
    save_file({k: v.float() for k, v in exact.items()}, decoded / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, source).merge_and_unload()
    merged.save_pretrained(place.root / "peft")
    wanted = {name: tensor.bfloat16() for name, tensor in state_of(place.root / "peft").items()}
    return Case([f"source={source}", f"base={fp8}"], ["merge", "convert"], wanted)


def _with_wrappers(new_name: Callable[[str], str], *, pickled: bool) -> Callable[[Place], Case]:
    """Make a case of an adapter whose names have prefixes of torch.compile, DDP or FSDP."""

    def make(place: Place) -> Case:
        source = rename(place.adapter, place.root / "wrapped", new_name, ADAPTER)
        if pickled:
            file = source / "adapter_model.safetensors"
            torch.save(load_file(file), source / "adapter_model.bin")
            file.unlink()
        arguments = [f"source={source}", f"base={place.base}", BASE]
        return Case(arguments, ["merge", "convert"], place.merged, {"WRAPPER_RESIDUE"})

    return make


def _inside_layers(key: str) -> str:
    return re.sub(r"(layers[.]\d+[.])", r"\1_checkpoint_wrapped_module.", key)


def _several_wrappers(key: str) -> str:
    return "module._orig_mod." + key.replace("mlp.", "_orig_mod.mlp.module.")


SOURCES: dict[str, Callable[[Place], Case]] = {
    "LLaMA-Factory": _trainer(making.llamafactory, "out", "ADAPTER_IS_NO_MODEL", "PICKLE_CLASSES"),
    "axolotl": _trainer(making.axolotl, "axolotl-out", "CONFIG_BESIDE_ADAPTER"),
    "verl": _trainer(making.verl, "lora_adapter", "ADAPTER_IS_NO_MODEL"),
    "OpenRLHF, ZeRO-3": _trainer(making.openrlhf_zero3, "ckpt", "PICKLED_WEIGHTS"),
    "a model in .bin files": _full_in_bin_files,
    "a base in .bin files": _base_in_bin_files,
    "our shards": _our_shards,
    "our shards of a full model": _our_full_shards,
    "ZeRO-2": _deepspeed(2),
    "ZeRO-3": _deepspeed(3),
    "unsloth, one file": _unsloth("1GB"),
    "unsloth, shards": _unsloth("40KB"),
    "a base in 4 bits": _packed_base,
    "a model in 4 bits": _packed_model,
    "experts in fp8": _fp8_experts,
    "wrapped layers, pickled": _with_wrappers(_inside_layers, pickled=True),
    "several wrappers": _with_wrappers(_several_wrappers, pickled=False),
}


@pytest.fixture
def work(
    base: Path, ours: Path, adapter: Path, shards: Path, trained: Any, merged: Tensors,
    tmp_path: Path,
) -> Place:  # fmt: skip
    return Place(tmp_path, base, ours, adapter, shards, trained, merged)


MORE = (
    "axolotl", "a model in .bin files", "ZeRO-2", "unsloth, one file", "unsloth, shards",
    "several wrappers", "a base in 4 bits",
)  # fmt: skip
"""Sources that the default suite leaves to `make test-all`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in MORE else ()) for name in SOURCES],
)
def test_is_delivered_with_the_tensors_that_were_trained(
    here: Run, name: str, work: Place, tmp_path: Path
) -> None:
    case = SOURCES[name](work)
    done = here(*case.arguments)
    assert done.stages == ["audit", *case.stages]
    assert differing(state_of(tmp_path / "out"), case.wanted) == []
    assert case.codes <= done.codes
    errors = [each for each in done.summary["findings"] if each["severity"] == "error"]
    assert [each["code"] for each in errors if not each["handled"]] == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert not {"torch_dtype", "quantization_config"} & config.keys()
    assert not list((tmp_path / "out").glob("*.bin"))
    if name in ("LLaMA-Factory", "unsloth, shards"):
        is_whole(tmp_path / "out")


def test_a_second_delivery_does_nothing_and_nothing_is_shared_with_the_store(
    here: Run, adapter: Path, base: Path, merged: Tensors, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = (f"source={adapter}", f"base={base}", BASE)
    done = here(*arguments)
    assert done.summary["served"] == str(out)
    assert differing(state_of(out), merged) == []
    is_whole(out)
    assert "## Proof" in (out / "README.md").read_text()
    store = tmp_path / "runs" / "artifacts" / "served"
    (published,) = (path for path in store.iterdir() if path.name[0] != ".")
    first, stored = out / "model.safetensors", published / "model.safetensors"
    content = stored.read_bytes()
    assert first.read_bytes() == content
    assert not os.path.samefile(first, stored)
    assert not {"prefect", "mlflow"} & {path.name for path in (tmp_path / "runs").iterdir()}
    before = (out / "manifest.json").stat()
    assert all(stage["reused"] for stage in here(*arguments).summary["stages"])
    assert (out / "manifest.json").stat() == before

    here(f"source={out}", f"out={tmp_path / 'second'}")  # a delivery is a source, too
    second = tmp_path / "second" / "model.safetensors"
    with first.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([content[-1] ^ 1]))
    assert second.read_bytes() == content, "a write to the source changes nothing that is served"
    assert all(each.read_bytes() == content for each in store.glob("*/model.safetensors"))


def test_an_adapter_finds_the_base_it_names_and_goes_to_fp16_in_small_files(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    more = ["convert.dtype=float16", "convert.max_shard_size=60KB", BASE]
    planned = here(f"source={adapter}", *more, "plan=true")
    assert str(base) in planned.output
    assert not list(tmp_path.iterdir())
    here(f"source={adapter}", *more)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert {tensor.dtype for tensor in state_of(tmp_path / "out").values()} == {torch.float16}
    is_whole(tmp_path / "out")


def test_ends_of_the_tokenizer_and_of_the_base_are_both_kept(
    here: Run, shards: Path, ours: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(shards, tmp_path / "shards")
    path = source / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [9, 2, 5]}))
    here(f"source={source}", f"base={ours}")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [0, 2, 9, 5]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_that_was_not_gathered_names_the_shards_beside_it(
    here: Run, stage: int, work: Place, tmp_path: Path
) -> None:
    """A folder of transformers' Trainer under ZeRO: an adapter of empty tensors."""
    source = tmp_path / "checkpoint-1"
    parameters = work.trained.named_parameters()
    live = {name: each.detach().float() for name, each in parameters if each.requires_grad}
    write_zero(source, [live], stage, 2, 2)
    names = load_file(work.adapter / "adapter_model.safetensors")
    save_file({name: torch.empty(0) for name in names}, source / "adapter_model.safetensors")
    shutil.copy(work.adapter / "adapter_config.json", source)
    refused = here(f"source={source}", f"base={work.base}", code=2)
    assert "EMPTY_TENSOR adapter_model.safetensors" in refused.output
    advice = re.search(r"-> python flows/deliver.py (source=\S+)", refused.output)
    assert advice is not None, refused.output
    done = here(advice[1], f"base={work.base}", BASE)
    assert done.stages == ["audit", "gather", "merge", "convert"]
    assert differing(state_of(tmp_path / "out"), work.merged) == []


def test_shards_of_which_the_index_was_not_copied(here: Run, work: Place, tmp_path: Path) -> None:
    """unsloth #1521, #1122: refused with the command that rebuilds it, and then delivered."""
    from tasks.audit.repair import repair

    source = tmp_path / "merged_16bit"
    making.unsloth_merged(work.merged, _sixteen_bits(work, "40KB"), source)
    (source / INDEX).unlink()
    refused = here(f"source={source}", code=2)
    assert f"python flows/audit.py source={source} fix=true" in refused.output
    repair(source, tmp_path / "whole")
    here(f"source={tmp_path / 'whole'}")
    assert differing(state_of(tmp_path / "out"), work.merged) == []


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "pretrained_model.module."])
def test_wrapped_weights_beside_a_head_are_delivered(
    here: Run, tmp_path: Path, prefix: str
) -> None:
    save_llamafactory(tmp_path / "plain", "qwen")
    rename(tmp_path / "plain", tmp_path / "ppo", lambda name: prefix + name)
    here(f"source={tmp_path / 'ppo'}")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    wanted = {name: tensor.bfloat16() for name, tensor in stored.items()}
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_the_reference_of_wrapped_names_is_the_trained_model(
    here: Run, adapter: Path, base: Path, kind: str, tmp_path: Path
) -> None:
    """Peft and transformers find none of these names, and would answer as another model."""
    if kind == "adapter":
        source = rename(adapter, tmp_path / "source", _several_wrappers, ADAPTER)
        more = [f"base={base}", BASE]
    else:
        source, more = rename(base, tmp_path / "source", _several_wrappers), []
    done = here(f"source={source}", "smoke.probes=4", *more, engine="transformers")
    assert done.summary["stages"][-1]["drift"]["mean_kl"] < 1e-4


def test_a_base_of_wrapped_names_is_refused(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    """Training and servers read the base as well: the command repairs it for all of them."""
    wrapped = rename(base, tmp_path / "base", lambda name: f"_orig_mod.{name}")
    assert "WRAPPER_RESIDUE" in here(f"source={adapter}", f"base={wrapped}", code=2).output


QUANTISED = [
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "auto"),
    ({"quant_method": "gptq", "bits": 4}, "original"),
    ({"quant_method": "mxfp4"}, "dequantized"),
]


@pytest.mark.parametrize(("how", "mode"), QUANTISED)
def test_a_base_that_cannot_be_decoded_is_refused(
    tmp_path: Path, base: Path, adapter: Path, here: Run, how: dict[str, object], mode: str
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "quantised"))
    change_config(folder, quantization_config=how)
    (folder / "README.md").write_text("---\nbase_model:\n- some/original\n---\n")
    assert codes(adapter, base=folder)["BASE_QUANTISED"] == "error"
    here(f"source={adapter}", f"base={folder}", f"merge.base={mode}", code=2)


def test_fp8_does_not_go_through_4_bits(
    tmp_path: Path, base: Path, adapter: Path, here: Run
) -> None:
    scale_fp8(base, tmp_path / "fp8", "static")
    arguments = [f"source={adapter}", f"base={tmp_path / 'fp8'}", "check_base=false"]
    here(*arguments, "merge.base=dequantized", code=2)


@pytest.mark.slow  # TRL takes many seconds to import
@pytest.mark.parametrize("name", ["trl-lora", "trl-sft", "trl-reward"])
def test_checkpoints_of_trl(
    here: Run, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tests.audit.corpus import Corpus
    from tests.audit.corpus.clean import CLEAN

    corpus = Corpus(tmp_path_factory.mktemp("trl"), CLEAN)
    source, more = corpus.clean(name), []
    wanted = {key: tensor.bfloat16() for key, tensor in state_of(source).items()} if (
        name != "trl-lora"
    ) else merged_by_peft(corpus.clean("qwen2"), source)  # fmt: skip
    if name == "trl-lora":
        more = [f"base={corpus.clean('qwen2')}", BASE]
    done = here(f"source={source}", *more)
    assert done.stages == ["audit", *(["merge"] if more else []), "convert"]
    assert differing(state_of(tmp_path / "out"), wanted) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_engine_agrees_with_base_and_adapter_in_peft(
    deliver: Run, engine: str, tmp_path: Path
) -> None:
    """The folder of the last step, beside the adapter, is not used."""
    base = making.servable(tmp_path / "base")
    source = tmp_path / "checkpoints" / "lora"
    making.llamafactory(trained_model(base, Spread(), 1), source)
    done = deliver(f"source={source}", f"base={base}", BASE, engine=engine, timeout=570)
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert all(0 <= stage["drift"]["mean_kl"] < 1e-3 for stage in done.summary["stages"][2:])
    report = Path(done.summary["stages"][-1]["artifact"], "report.json")
    assert json.loads(report.read_text())["engine"] == engine
    assert differing(state_of(tmp_path / "out"), merged_by_peft(base, source)) == []
    assert (tmp_path / "runs" / "prefect" / "prefect.db").is_file()
    assert done.summary["mlflow_run_id"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_serves_a_quantised_version_and_the_16_bits_stay(deliver: Run, tmp_path: Path) -> None:
    source = making.servable(tmp_path / "source")
    done = deliver(f"source={source}", "convert.quantize=w8a8", engine="vllm", timeout=800)
    own = ["audit", "reference", "convert", "smoke_eval", "quantize", "smoke_quantized"]
    assert done.stages == own
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    before, after = (done.summary["stages"][at]["drift"]["mean_kl"] for at in (3, 5))
    assert before < after < 1e-2
    whole = Path(done.summary["stages"][2]["artifact"]) / "config.json"
    assert "quantization_config" not in json.loads(whole.read_text())
