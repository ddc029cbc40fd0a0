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
from tests.audit.making import codes, edit_json
from tests.delivery import making
from tests.delivery.conftest import Done
from tests.delivery.making import Tensors, differing, merged_by_peft, rename, write_zero
from tests.tiny import save_tokenizer
from tests.weights.making import Spread, load, quiet, state_of, trained_model
from tests.weights.packing import pack

Run = Callable[..., Done]
BASE = "merge.base=original"
ADAPTER = "adapter_model"


def is_whole(out: Path) -> None:
    """Check that transformers loads all of it, and that the artifact is as its manifest says."""
    from transformers import AutoTokenizer

    load(out)
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
    ends: list[int] | None = None


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


def _base_in_bin_files(place: Place) -> Case:
    arguments = [f"source={place.adapter}", f"base={_bin_files(place)}", BASE]
    return Case(arguments, ["merge", "convert"], place.merged)


def _our_shards(place: Place) -> Case:
    """Shards whose generation_config.json has other ids that end a text."""
    source = Path(shutil.copytree(place.shards, place.root / "shards"))
    edit_json(source / "generation_config.json", eos_token_id=[9, 2, 5])
    arguments = [f"source={source}", f"base={place.ours}"]
    ends = [0, 2, 9, 5]  # of the tokenizer and its template, then of the model
    return Case(arguments, ["gather", "merge", "convert"], place.merged, ends=ends)


def _deepspeed(place: Place) -> Case:
    """A full fine-tuning in DeepSpeed's layout, as `tests/weights/test_deepspeed.py` makes it."""
    generator = torch.Generator().manual_seed(2)
    trained = {
        name: tensor.float() + torch.randn(tensor.shape, generator=generator) * 0.05
        for name, tensor in state_of(place.base).items()
    }
    source = place.root / "zero"
    write_zero(source, trained, 3)
    shutil.copy(place.base / "config.json", source)
    wanted = {name: tensor.bfloat16() for name, tensor in trained.items()}
    return Case([f"source={source}", f"base={place.base}"], ["gather", "convert"], wanted)


def _unsloth(place: Place) -> Case:
    """A merged model in shards, without generation_config.json."""
    source = _unsloth_shards(place)
    return Case([f"source={source}"], ["convert"], place.merged)


def _unsloth_shards(place: Place) -> Path:
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(place.base)
        model.save_pretrained(place.root / "hub", max_shard_size="40KB")
    making.unsloth_merged(place.merged, place.root / "hub", place.root / "merged_16bit")
    return place.root / "merged_16bit"


def _packed_model(place: Place) -> Case:
    packed = place.root / "packed"
    wanted = pack(place.base, packed)
    save_tokenizer(packed)
    return Case([f"source={packed}"], ["convert"], wanted)


def _wrapped(place: Place) -> Case:
    """An adapter whose names have prefixes of torch.compile, DDP and FSDP, pickled."""
    source = rename(place.adapter, place.root / "wrapped", _several_wrappers, ADAPTER)
    file = source / "adapter_model.safetensors"
    torch.save(load_file(file), source / "adapter_model.bin")
    file.unlink()
    arguments = [f"source={source}", f"base={place.base}", BASE]
    return Case(arguments, ["merge", "convert"], place.merged, {"WRAPPER_RESIDUE"})


def _several_wrappers(key: str) -> str:
    key = re.sub(r"(layers[.]\d+[.])", r"\1_checkpoint_wrapped_module.", key)
    return "module._orig_mod." + key.replace("mlp.", "_orig_mod.mlp.module.")


SOURCES: dict[str, Callable[[Place], Case]] = {
    "LLaMA-Factory": _trainer(making.llamafactory, "out", "PICKLE_CALLS"),
    "OpenRLHF, ZeRO-3": _trainer(making.openrlhf_zero3, "ckpt", "PICKLED_WEIGHTS"),
    "a base in .bin files": _base_in_bin_files,
    "our shards": _our_shards,
    "ZeRO-3": _deepspeed,
    "wrapped layers, pickled": _wrapped,
}
SLOW: dict[str, Callable[[Place], Case]] = {
    "a model in 4 bits": _packed_model,
    "unsloth, shards": _unsloth,
}


@pytest.fixture
def work(
    base: Path, ours: Path, adapter: Path, shards: Path, trained: Any, merged: Tensors,
    tmp_path: Path,
) -> Place:  # fmt: skip
    return Place(tmp_path, base, ours, adapter, shards, trained, merged)


@pytest.mark.parametrize(
    "name", [*SOURCES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_is_delivered_with_the_tensors_that_were_trained(here, name, work, tmp_path) -> None:
    case = {**SOURCES, **SLOW}[name](work)
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
    if case.ends is not None:
        for file in ("config.json", "generation_config.json"):
            stored = json.loads((tmp_path / "out" / file).read_text())
            assert stored["eos_token_id"] == case.ends


def test_a_second_delivery_does_nothing_and_weights_are_written_once(
    here: Run, adapter: Path, base: Path, other: Path, merged: Tensors, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = (f"source={adapter}", BASE)
    planned = here(*arguments, "plan=true")
    assert str(base) in planned.output, "the adapter names its base"
    assert not list(tmp_path.iterdir())
    here(*arguments)
    assert differing(state_of(out), merged) == []
    is_whole(out)
    store = tmp_path / "runs" / "artifacts" / "served"
    (published,) = (path for path in store.iterdir() if path.name[0] != ".")
    first, stored = out / "model.safetensors", published / "model.safetensors"
    content = stored.read_bytes()
    assert first.read_bytes() == content
    assert os.path.samefile(first, stored)
    assert not first.stat().st_mode & 0o222
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
    here(*arguments)
    assert stored.read_bytes() == content, "the altered artifact is made again"
    assert first.read_bytes() == content, "and so is OUT, which was altered with it"

    out = tmp_path / "second"  # another model takes its place only when it is asked for
    words = (f"source={other}", f"out={out}")
    assert "overwrite=true" in here(*words, code=2).output
    assert second.read_bytes() == content
    here(*words, "overwrite=true")
    assert differing(state_of(out), state_of(other)) == []


def test_an_adapter_that_was_not_gathered_names_the_shards_beside_it(here, work, tmp_path) -> None:
    """A folder of transformers' Trainer under ZeRO: an adapter of empty tensors."""
    source = tmp_path / "checkpoint-1"
    parameters = work.trained.named_parameters()
    live = {name: each.detach().float() for name, each in parameters if each.requires_grad}
    write_zero(source, live, 2)
    names = load_file(work.adapter / "adapter_model.safetensors")
    save_file({name: torch.empty(0) for name in names}, source / "adapter_model.safetensors")
    shutil.copy(work.adapter / "adapter_config.json", source)
    refused = here(f"source={source}", f"base={work.base}", code=2)
    assert "EMPTY_TENSOR adapter_model.safetensors" in refused.output
    advice = re.search(r"-> .*deliver\S* (source=\S+)", refused.output)
    assert advice is not None, refused.output
    done = here(advice[1], f"base={work.base}", BASE)
    assert done.stages == ["audit", "gather", "merge", "convert"]
    assert differing(state_of(tmp_path / "out"), work.merged) == []


@pytest.mark.slow
def test_the_reference_of_wrapped_names_is_the_trained_model(here, adapter, base, tmp_path) -> None:
    """peft finds none of these names, and would answer as the base."""
    source = rename(adapter, tmp_path / "source", _several_wrappers, ADAPTER)
    words = [f"source={source}", f"base={base}", BASE, "smoke.probes=4"]
    done = here(*words, engine="transformers")
    assert done.summary["stages"][-1]["drift"]["mean_kl"] < 1e-4


@pytest.mark.parametrize(
    ("how", "mode", "thing"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "auto", "8 bits"),
        ({"quant_method": "gptq", "bits": 4}, "original", "gptq"),
    ],
)
def test_a_base_that_cannot_be_decoded_is_refused_by_name(
    tmp_path, base, adapter, here, how, mode, thing
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "quantised"))
    edit_json(folder / "config.json", quantization_config=how)
    (folder / "README.md").write_text("---\nbase_model:\n- some/original\n---\n")
    assert codes(adapter, base=folder)["BASE_QUANTISED"] == "error"
    refused = here(f"source={adapter}", f"base={folder}", f"merge.base={mode}", code=2)
    assert thing in refused.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_agrees_with_base_and_adapter_in_peft(deliver, tmp_path) -> None:
    """The folder of the last step, beside the adapter, is not used."""
    base = making.servable(tmp_path / "base")
    source = tmp_path / "checkpoints" / "lora"
    making.llamafactory(trained_model(base, Spread(), 1), source)
    done = deliver(f"source={source}", f"base={base}", BASE, engine="vllm", timeout=570)
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert all(0 <= stage["drift"]["mean_kl"] < 1e-3 for stage in done.summary["stages"][2:])
    report = Path(done.summary["stages"][-1]["artifact"], "report.json")
    assert json.loads(report.read_text())["engine"] == "vllm"
    assert differing(state_of(tmp_path / "out"), merged_by_peft(base, source)) == []
    assert (tmp_path / "runs" / "prefect" / "prefect.db").is_file()
    assert done.summary["mlflow_run_id"]
