"""Merge and convert: equal to peft, with every file that loads it; planted faults are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError, ConfigError, ContractError
from tasks.drift.fingerprint import PROFILES, Fingerprint
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.scoring import ModelRef
from tasks.pipeline.artifact import Origin, publish, staging
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.proof import recompute, recomputed_check
from tests.audit.making import edit_json
from tests.weights.making import (
    converted,
    copy_reference,
    failed,
    measure_here,
    merged,
    merged_as_trained,
    merged_by_peft,
    planned,
    state_of,
)

STANDARD = PROFILES["standard"]
Tensors = dict[str, torch.Tensor]


def _differing(folder: Path, model: Any) -> list[str]:
    """Return the tensors of a folder that are not those of a model."""
    wanted, state = model.state_dict(), state_of(folder)
    assert wanted.keys() - state.keys() <= {"lm_head.weight"}
    return [name for name, tensor in state.items() if not torch.equal(tensor, wanted[name])]


def test_qlora_merges_into_the_base_that_training_saw(
    qwen, qlora_adapter, qlora_run, out, tmp_path
) -> None:
    report = merged(out, qlora_adapter, qwen.path, qlora_run, score=measure_here)
    assert failed(report.checks) == []
    inspected = [check for check in report.checks if check.name.startswith("values of ")]
    assert len(inspected) == 14, "twelve copied tensors are compared with nothing"
    assert _differing(out, merged_as_trained(qwen.path, qlora_adapter)) == []
    assert report.notes["merge_base"]["base"] == "dequantized"
    assert report.drift is not None
    assert report.drift.mean_kl <= STANDARD.mean_kl
    assert "quantization_config" not in json.loads((out / "config.json").read_text())

    (second := tmp_path / "original").mkdir()  # into the original base it is another model
    report = merged(
        second, qlora_adapter, qwen.path, qlora_run, score=measure_here, base_mode="original"
    )
    assert report.notes["merge_base"]["base"] == "original"
    (check,) = (check for check in report.checks if not check.ok)
    assert "merge.base=auto" in check.hint
    assert _differing(second, merged_by_peft(qwen.path, qlora_adapter)) == []


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
FAULTS = {
    # fault: (checks that find it)
    "module skipped": {"rows", "drift"},
    "adapter twice": {"rows", "drift", "share"},
    "other base": {"rows", "drift"},
    "a module of 210 skipped": {"rows"},
    "one expert of a mixture skipped": {"rows", "drift"},
}


def _spoil(fault: str, base: Tensors, right: Tensors) -> Tensors:
    """Return the tensors of a right merge with a fault in them."""

    def times(scale: float, *names: str) -> Tensors:
        update = {name: right[name].float() - base[name].float() for name in names or right}
        return {n: (base[n].float() + scale * change).bfloat16() for n, change in update.items()}

    if fault == "module skipped":
        return {O_PROJ: base[O_PROJ]}
    if fault == "a module of 210 skipped":  # as light as in a deep model
        return times(0.98, O_PROJ)
    if fault == "one expert of a mixture skipped":
        names = [name for name in right if ".layers.1." in name and ".experts.1." in name]
        assert len(names) == 3
        return {name: base[name] for name in names}
    if fault == "other base":
        made = torch.Generator().manual_seed(0)
        noise = {n: torch.randn(t.shape, generator=made) for n, t in right.items() if t.dim() > 1}
        return {name: (right[name] + 0.02 * each).bfloat16() for name, each in noise.items()}
    return times(2.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(request: pytest.FixtureRequest, out: Path, fault: str) -> None:
    names = ["llama", "lora_adapter", "lora_run"]
    if "mixture" in fault:
        names = ["mixture", "mixture_adapter", "mixture_run"]
    artifact, adapter, run = map(request.getfixturevalue, names)
    merged(out, adapter, artifact.path, run)
    right = state_of(out)
    spoiled = right | _spoil(fault, state_of(artifact.path), right)
    for path in out.glob("model*"):
        path.unlink()
    save_file(spoiled, out / "model.safetensors", metadata={"format": "pt"})
    plan = planned(adapter, artifact.path)
    rows = recompute(plan.plan, plan.sources, read_checkpoint(out))
    _, checks = Measuring(measure_here, adapter, STANDARD).take(ModelRef(out), out)
    finders = {"rows": recomputed_check(rows), "drift": checks[0], "share": checks[1]}
    assert {name for name, check in finders.items() if not check.ok} == FAULTS[fault]


def test_inputs_that_do_not_fit_write_nothing(llama, lora_adapter, lora_run, out, tmp_path) -> None:
    with pytest.raises(ConfigError, match="dequantized"):
        merged(out, lora_adapter, llama.path, lora_run, base_mode="dequantized")

    broken = shutil.copytree(lora_adapter, tmp_path / "broken")
    path = broken / "adapter_model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    path.write_bytes(whole[:-2])
    with pytest.raises(ArtifactError, match=r"adapter_model\.safetensors"):
        merged(out, broken, llama.path, lora_run)
    del tensors["base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(ContractError) as caught:
        merged(out, broken, llama.path, lora_run)
    assert any("gate_proj.lora_B" in line for line in caught.value.details)
    assert list(out.iterdir()) == []


def test_modules_without_effect_are_a_warning(llama, lora_adapter, lora_run, out, tmp_path, caplog):
    """A tower that saw no data has a lora_B of zeros, and an update may round away."""
    weak = shutil.copytree(lora_adapter, tmp_path / "weak")
    path = weak / "adapter_model.safetensors"
    tensors = load_file(path)
    values = {"0.self_attn.k_proj": 0.0, "1.self_attn.v_proj": 1e-9, "1.mlp.up_proj": 0.0}
    for module, value in values.items():
        tensors[f"base_model.model.model.layers.{module}.lora_B.weight"].fill_(value)
    save_file(tensors, path)
    report = merged(out, weak, llama.path, lora_run)
    assert failed(report.checks) == []
    base, made = state_of(llama.path), state_of(out)
    same = {name for name in made if torch.equal(base[name], made[name])}
    assert same >= {f"model.layers.{module}.weight" for module in values}
    (warning,) = [entry for entry in caplog.records if entry.levelname == "WARNING"]
    assert "3 of 14" in warning.getMessage()


def test_one_pass_with_convert_and_both_verdicts(llama, lora_adapter, lora_run, tmp_path) -> None:
    """Merge already writes the converted files; convert links all of them."""
    settings = {"dtype": "float16", "max_shard_size": "90KB"}
    folder, served = tmp_path / "merged", tmp_path / "served"
    with staging(folder) as work:
        report = merged(work, lora_adapter, llama.path, lora_run, score=measure_here, **settings)
        publish(work, folder, Origin(report.kind, "merge", "key"))
    assert failed(report.checks) == []
    wanted = merged_by_peft(llama.path, lora_adapter, dtype=torch.float16)
    assert _differing(folder, wanted) == []
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"

    def never(*_: object) -> None:
        raise AssertionError("what merge has measured is carried over")

    served.mkdir()
    second = converted(served, folder, lora_run, never, reference=lora_adapter, **settings)
    assert failed(second.checks) == []
    assert second.drift == report.drift
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert second.notes == {"linked": files, "drift_carried_over": True}


@pytest.mark.parametrize("place", ["store", "elsewhere", "behind links"])
def test_unchanged_shards_are_links_within_the_store_and_copies_elsewhere(
    place: str, llama, lora_adapter, lora_run, tmp_path
) -> None:
    store = tmp_path / "artifacts"
    base = llama.path if place == "elsewhere" else store / "base" / "llama"
    if place != "elsewhere":
        shutil.copytree(llama.path, base)
    if place == "behind links":  # a base artifact is made of links to the user's files
        for path in base.glob("*.safetensors"):
            path.unlink()
            path.symlink_to(llama.path / path.name)
    out = store / "weights" / ".key.tmp"
    out.mkdir(parents=True)
    merged(out, lora_adapter, base, lora_run)
    linked = [p.name for p in out.glob("*.safetensors") if p.stat().st_nlink > 1]
    assert not [path for path in out.iterdir() if path.is_symlink()]
    assert bool(linked) == (place == "store")  # the embedding and the head have files of their own
    assert all((out / n).samefile(base / n) for n in linked)
    assert [n for n in linked if (base / n).stat().st_mode & 0o222] == []


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def weights_copy(full_weights: Path, tmp_path: Path) -> Path:
    return shutil.copytree(full_weights, tmp_path / "weights")


def _never(*_: object) -> Fingerprint:
    raise AssertionError("nothing changed, so nothing is to be measured")


def test_resharding_keeps_every_byte_and_loads_in_transformers(full_weights, full_run, out) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = converted(out, full_weights, full_run, _never, max_shard_size="60KB")
    assert failed(report.checks) == []
    assert report.notes["drift_carried_over"] is True
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert all(torch.equal(t, state_of(full_weights)[n]) for n, t in state_of(out).items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state_of(out).values())
    assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 60_000 for file in files)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not {*info["missing_keys"], *info["unexpected_keys"]}
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_stop_ids_are_the_tokenizers_the_templates_and_the_bases(
    weights_copy, full_run, out
) -> None:
    for name, ids in {"generation_config.json": [7, 2], "config.json": 9}.items():
        edit_json(weights_copy / name, eos_token_id=ids)
    report = converted(out, weights_copy, full_run, copy_reference)
    assert failed(report.checks) == []
    for name in ("generation_config.json", "config.json"):
        document = json.loads((out / name).read_text())
        # <|endoftext|>, and <|im_end|> from the template; then the base's
        assert document["eos_token_id"] == [0, 2, 7, 9]
        assert document["pad_token_id"] == 3


def test_what_cannot_be_served_fails_by_name(weights_copy, full_run, out, tmp_path) -> None:
    trained = shutil.copytree(full_run, tmp_path / "run")
    path, config = weights_copy / "model.safetensors", weights_copy / "config.json"
    tensors, whole = load_file(path), path.read_bytes()
    tensors["model.norm.weight"][5] = 1e6  # too large for fp16
    tensors[HEAD] = tensors[EMBEDDING] + 1  # which should be tied
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = trained / "tokenizer" / "tokenizer.json"
    tokens = json.loads(tokenizer.read_text())["added_tokens"]
    edit_json(tokenizer, added_tokens=[*tokens, {"id": 300, "content": "<new>", "special": False}])
    report = converted(out, weights_copy, trained, copy_reference, dtype="float16")
    assert set(failed(report.checks)) == {
        "values of model.norm.weight",
        HEAD,
        "tokenizer fits the embedding",
    }

    path.write_bytes(whole)
    edit_json(config, tie_word_embeddings=False)  # without a head
    with pytest.raises(ContractError, match=HEAD):
        converted(tmp_path / "second", weights_copy, full_run, copy_reference)
    edit_json(config, tie_word_embeddings=True, vocab_size=301)
    with pytest.raises(ContractError, match=EMBEDDING):
        converted(tmp_path / "third", weights_copy, full_run, copy_reference)
