"""Bases that bitsandbytes packed in 4 bits: decoded bit for bit as it does, or refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.artifact import Artifact, Origin, publish, staging
from tasks.errors import ArtifactError, ConfigError
from tasks.fingerprint import PROFILES
from tasks.gather import gather
from tasks.merge import merge
from tasks.preflight import model as preflight
from tasks.weights.adapters.changes import Changes
from tasks.weights.contracts import model_facts
from tasks.weights.execute import execute
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.journal import identify
from tasks.weights.nf4 import as_trained
from tasks.weights.opening import SourceRef, open_sources
from tasks.weights.plan import Op, Plan
from tasks.weights.stored4bit.packed import BLOCKSIZES, LEVELS, STATE
from tasks.weights.stored4bit.plans import decoding
from tasks.weights.stored4bit.said import is_packed, stored
from tasks.weights.stored4bit.source import PackedCheckpoint, open_base
from tasks.weights.validate import validate
from tests.weights.making import (
    NF4,
    Spread,
    copy_reference,
    failed,
    measure_here,
    save_tokenizer,
    state_of,
    write_trained,
)

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def pack(
    base: Path,
    out: Path,
    *,
    kind: str = "nf4",
    double: bool = True,
    blocksize: int = 64,
    storage: torch.dtype = torch.uint8,
    max_shard_size: str = "5GB",
) -> dict[str, torch.Tensor]:
    """Save a 4-bit model as transformers does; what `dequantize` makes of the saved one.

    transformers has no setting for the block size: other ones are packed anew in its model.
    """
    from bitsandbytes import nn
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=config
    )
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear4bit)}
    if blocksize != 64:
        plain = state_of(base)
        for name, layer in layers.items():
            layer.weight = nn.Params4bit(
                plain[f"{name}.weight"],
                requires_grad=False,
                blocksize=blocksize,
                compress_statistics=double,
                quant_type=kind,
                quant_storage=storage,
                module=layer,
            ).to("cpu")
    model.save_pretrained(out, max_shard_size=max_shard_size)
    again = AutoModelForCausalLM.from_pretrained(out)
    assert all(m.weight.quant_state.blocksize == blocksize for m in layers.values())
    return again.dequantize().state_dict()


def decode_all(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The whole base through a plan, its JSON and the engine."""
    with open_sources({"base": SourceRef(folder, "base")}) as sources:
        tensors = sources["base"].tensors
        ops = [Op(k, tuple(t.shape), t.dtype, f"base:{k}", t.dtype) for k, t in tensors.items()]
        plan = decoding(Plan(tuple(ops)), sources)
        assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
        validate(plan, sources)
        out.mkdir(parents=True)
        done = execute(plan, sources, out)
        assert done.nonfinite == {}
    return state_of(out)


def write_packed(folder: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Matrices packed by bitsandbytes alone, as its layers write them, and a config.json."""
    from bitsandbytes import functional

    files: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        packed, state = functional.quantize_4bit(tensor, **options)
        files[key] = packed
        files |= {f"{key}.{name}": one for name, one in state.as_dict(packed=True).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(files, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))


def restored(folder: Path) -> dict[str, torch.Tensor]:
    """What bitsandbytes itself makes of such a folder."""
    from bitsandbytes import functional

    files = load_file(folder / "model.safetensors")
    found = {}
    for key in [name for name in files if f"{name}.absmax" in files]:
        said = {n.removeprefix(f"{key}."): t for n, t in files.items() if n.startswith(f"{key}.")}
        state = functional.QuantState.from_dict(said, torch.device("cpu"))
        shape, state.shape = state.shape, torch.Size([prod(state.shape)])
        found[key] = functional.dequantize_4bit(files[key], state).reshape(shape)
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Keys whose tensors differ in dtype, shape or any bit; keys that only one has.

    But for the sign of zeros: FP4 has two, and bitsandbytes' AVX-512 kernel makes both 0.0 where
    its scalar one makes one of them -0.0.
    """
    bits: dict[str, list[Any]] = {}
    for name, tensor in [*one.items(), *other.items()]:
        positive = (tensor.reshape(-1) + 0).contiguous().view(torch.uint8)
        found = (tensor.dtype, tensor.shape, positive.numpy().tobytes())
        bits.setdefault(name, []).append(found)
    return [name for name, both in bits.items() if len(both) != 2 or both[0] != both[1]]


def alter(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The folder with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def restate(**changes: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Other words in the JSON of one matrix; a value of None takes one out."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (key for key in tensors if key.startswith(Q_PROJ + STATE))
        state = {**json.loads(bytes(tensors[name].tolist())), **changes}
        state = {key: value for key, value in state.items() if value is not None}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory, qwen: Artifact) -> Path:
    """A tied model, double quantisation."""
    root = tmp_path_factory.mktemp("nf4") / "model"
    pack(qwen.path, root)
    return root


@pytest.fixture
def copy(nf4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nf4, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"kind": "nf4", "double": True, "max_shard_size": "30KB"}),
        ("qwen", {"kind": "fp4", "double": True}),
        ("qwen", {"kind": "nf4", "double": False}),
        ("llama", {"kind": "fp4", "double": False, "storage": torch.bfloat16}),
        ("llama", {"kind": "nf4", "double": True, "blocksize": 32, "storage": torch.float32}),
    ],
)
def test_every_tensor_is_what_transformers_dequantizes(
    family: str, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base: Artifact = request.getfixturevalue(family)
    expected = pack(base.path, tmp_path / "packed", **options)
    found = decode_all(tmp_path / "packed", tmp_path / "out")
    plain = state_of(base.path)
    assert same(found, {name: expected[name] for name in plain}) == []
    assert 0 < len(same(found, plain)) < len(plain)  # really packed, and not all of it


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 30), min_size=1, max_size=3).filter(lambda s: prod(s) % 2 == 0),
    kind=st.sampled_from(["nf4", "fp4"]),
    double=st.booleans(),
    blocksize=st.sampled_from(BLOCKSIZES[:-2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_matrix_is_what_bitsandbytes_dequantizes(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    kind: str,
    double: bool,
    blocksize: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Vectors, stacks; rows that no block size divides; every dtype it packs.

    bitsandbytes is asked for one long row: its AVX-512 kernel errs where rows end within blocks.
    """
    folder = tmp_path_factory.mktemp("matrix")
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    options = {"blocksize": blocksize, "quant_type": kind, "compress_statistics": double}
    write_packed(folder, {"one.weight": matrix}, **options)
    expected = restored(folder)
    assert expected["one.weight"].shape == matrix.shape
    assert same(decode_all(folder, folder / "out"), expected) == []


@pytest.mark.parametrize("shape", [(5, 7), (96, 96), (3, 4304)])
@pytest.mark.parametrize("blocksize", [64, 2048])
def test_rows_that_end_within_blocks_are_near_what_was_packed(
    shape: tuple[int, int], blocksize: int, tmp_path: Path
) -> None:
    """Where bitsandbytes' own kernel takes other blocks' scales: 4 bits lose 9 to 11 %, not 25."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    write_packed(tmp_path, {"one.weight": matrix}, blocksize=blocksize, quant_type="nf4")
    found = decode_all(tmp_path, tmp_path / "out")["one.weight"].float()
    assert float((found - matrix.float()).norm() / matrix.float().norm()) < 0.13
    trained = as_trained(matrix, {"type": "nf4", "double_quant": True}).float()
    assert float((trained - matrix.float()).norm() / matrix.float().norm()) < 0.13


def test_values_are_those_built_into_bitsandbytes() -> None:
    from bitsandbytes.functional import get_4bit_type

    for kind, values in LEVELS.items():
        assert torch.equal(torch.tensor(values), get_4bit_type(kind, device="cpu"))


def test_looks_like_the_model_that_was_packed(nf4: Path, qwen: Artifact) -> None:
    with open_base(nf4) as packed, open_base(qwen.path) as plain:
        assert isinstance(packed, PackedCheckpoint)
        described = {k: (tuple(t.shape), t.dtype) for k, t in packed.tensors.items()}
        assert described == {k: (tuple(t.shape), t.dtype) for k, t in plain.tensors.items()}
        assert set(packed.files) == set(described)
        assert packed.sha256(Q_PROJ) is None
        assert sum(len(packed.extents(key)) for key in packed.tensors) == len(packed.whole.tensors)
    facts, expected = model_facts(nf4), model_facts(qwen.path)
    assert facts.findings == ()
    assert set(facts.tensors) == set(expected.tensors)
    assert facts.tied == expected.tied
    assert set(facts.quantized) == set(expected.quantized)


TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def gpt2(folder: Path) -> Path:
    """A GPT-2 in bf16, whose layers are `Conv1D`."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, **ends), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def test_gpt2_comes_out_as_it_lies_on_disk(tmp_path: Path) -> None:
    """transformers packs the transpose of what GPT-2's checkpoints hold."""
    from transformers import AutoModelForCausalLM

    dequantized = pack(gpt2(tmp_path / "base"), tmp_path / "packed")
    found = decode_all(tmp_path / "packed", tmp_path / "out")
    for name, tensor in found.items():
        theirs = dequantized[name]
        assert torch.equal(tensor, theirs.t() if name.endswith(TURNED) else theirs), name
    plain = state_of(tmp_path / "base")
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in plain.items()}
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "out")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not {*report["missing_keys"], *report["unexpected_keys"]}
    ids = torch.arange(12)[None]
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").dequantize()
    difference = (loaded(ids).logits - packed(ids).logits).float().abs().max()
    assert difference < 0.05  # the same numbers; bf16 sums of a transposed product


def test_gpt2_goes_through_the_4_bits_that_training_saw(tmp_path: Path) -> None:
    """QLoRA on a plain base whose layers are `Conv1D`: quantised as their transpose is."""
    base = gpt2(tmp_path / "base")
    dequantized = pack(base, tmp_path / "packed")
    facts = model_facts(base)
    asked = {**NF4, "loaded_dtype": "bfloat16", "base": "dequantized"}
    wanted = MergeSettings(quantization=asked, quantized=frozenset(facts.quantized))
    unchanged = Changes({}, {}, {}, (), (), {}, ())
    with open_sources({"base": SourceRef(base, "base")}) as sources:
        plan = plan_merge(sources["base"].tensors, facts, unchanged, {}, wanted)
        validate(plan, sources)
        (tmp_path / "out").mkdir()
        execute(plan, sources, tmp_path / "out")
    found = state_of(tmp_path / "out")
    expected = {n: dequantized[n].t() if n.endswith(TURNED) else dequantized[n] for n in found}
    assert same(found, expected) == []
    assert len(same(found, state_of(base))) == 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, nf4: Path) -> Artifact:
    root = tmp_path_factory.mktemp("stage") / "base"
    with staging(root) as work:
        shutil.copytree(nf4, work, dirs_exist_ok=True)
        save_tokenizer(work)
        return publish(work, root, Origin("base", "prepare", root.name))


@pytest.fixture(scope="module")
def run(base: Artifact) -> Path:
    return write_trained(base.path.parent / "run", base, Spread())


@pytest.fixture(scope="module")
def adapter(base: Artifact, run: Path) -> Path:
    root = base.path.parent / "adapter"
    log = logging.getLogger("tests.weights")
    with staging(root) as work:
        report = gather(work, trained=run, base=base.path, score=copy_reference, log=log)
        assert failed(report.checks) == []
        publish(work, root, Origin(report.kind, "gather", root.name))
    return root


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


class TestMerge:
    """The stage, on an adapter that real peft trained on the packed base."""

    @staticmethod
    def merge(out: Path, base: Artifact, adapter: Path, run: Path, **other: Any) -> Any:
        arguments: dict[str, Any] = {
            "base_mode": "auto",
            "score": measure_here,
            "profile": PROFILES["standard"],
            "log": logging.getLogger("tests.weights"),
        }
        where = {"adapter": adapter, "base": base.path, "trained": run}
        return merge(out, **where, **{**arguments, **other})

    def test_equals_pefts_merge_in_fp32_into_the_dequantized_model(
        self, base: Artifact, adapter: Path, run: Path, out: Path
    ) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        report = self.merge(out, base, adapter, run)
        assert failed(report.checks) == []
        assert report.drift is not None
        assert report.notes["merge_base"] == "dequantized"
        model = AutoModelForCausalLM.from_pretrained(base.path).dequantize().float()
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
        found = state_of(out)
        wanted = {name: merged[name].to(torch.bfloat16) for name in found}
        assert same(found, wanted) == []
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not {*info["missing_keys"], *info["unexpected_keys"]}
        assert not hasattr(again, "hf_quantizer")

    def test_the_bits_are_those_of_training_whatever_it_said(
        self, base: Artifact, adapter: Path, run: Path, tmp_path: Path
    ) -> None:
        other = Path(shutil.copytree(run, tmp_path / "run"))
        said = json.loads((other / "train.json").read_text())
        (other / "train.json").write_text(json.dumps({**said, "quantization": NF4}))
        for name, trained in {"one": run, "two": other}.items():
            (tmp_path / name).mkdir()
            self.merge(tmp_path / name, base, adapter, trained, score=copy_reference)
        assert same(state_of(tmp_path / "one"), state_of(tmp_path / "two")) == []

    def test_fp32_is_asked_for_in_one_pass(
        self, base: Artifact, adapter: Path, run: Path, out: Path
    ) -> None:
        output = {"dtype": "float32", "max_shard_size": "50KB"}
        self.merge(out, base, adapter, run, score=copy_reference, output=output)
        assert {tensor.dtype for tensor in state_of(out).values()} == {torch.float32}
        assert len(list(out.glob("model-*.safetensors"))) > 1

    def test_there_is_no_original(
        self, base: Artifact, adapter: Path, run: Path, out: Path
    ) -> None:
        with pytest.raises(ConfigError, match="these bits are all there is") as caught:
            self.merge(out, base, adapter, run, base_mode="original")
        assert caught.value.hint == "merge.base=auto"


def drop(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(Q_PROJ + name) for name in names]  # type: ignore[return-value]


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({Q_PROJ + name: value})


STATE_KEY = STATE + "bitsandbytes__nf4"
MUTATIONS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no scales": (drop(".absmax"), "absmax absent"),
    "no values": (drop(".quant_map"), "quant_map absent"),
    "no scales of scales": (drop(".nested_absmax"), "nested_absmax absent"),
    "no table of scales": (drop(".nested_quant_map"), "nested_quant_map absent"),
    "no state": (drop(STATE_KEY), "quant_state.* is none"),
    "no matrix": (drop(""), "absent, though .absmax"),
    "matrix alone": (
        drop(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE_KEY),
        "U8 [2048, 1] without .absmax",
    ),
    "short matrix": (
        put("", torch.zeros(2047, 1, dtype=torch.uint8)),
        "packed numbers of 2047 bytes, the shape needs 2048",
    ),
    "short scales": (
        put(".absmax", torch.zeros(63, dtype=torch.uint8)),
        "absmax is U8 [63], U8 [64] is needed",
    ),
    "plain scales": (put(".absmax", torch.zeros(64)), "absmax is F32 [64], U8 [64] is needed"),
    "short table": (put(".nested_quant_map", torch.zeros(255)), "nested_quant_map is F32 [255]"),
    "other values": (
        put(".quant_map", torch.tensor(LEVELS["fp4"])),
        "quant_map does not hold the values of nf4",
    ),
    "no JSON": (put(STATE_KEY, torch.full((9,), 91, dtype=torch.uint8)), "not readable"),
    "a list": (put(STATE_KEY, torch.tensor([91, 93], dtype=torch.uint8)), "not readable"),
    "two states": (
        put(STATE + "bitsandbytes__fp4", torch.zeros(4, dtype=torch.uint8)),
        "bitsandbytes__nf4, bitsandbytes__fp4",
    ),
    "another type": (restate(quant_type="fp4"), "says quant_type 'fp4'"),
    "another shape": (restate(shape=[64, 32]), "packed numbers of 2048 bytes"),
    "no shape": (restate(shape=None), "shape None is none"),
    "empty shape": (restate(shape=[0, 64]), "shape [0, 64] is none"),
    "unknown block size": (restate(blocksize=48), "blocksize 48 is not one of 32, 64"),
    "fraction": (restate(blocksize=64.0), "blocksize 64.0 is not one of"),
    "another block size": (restate(blocksize=128), "absmax is U8 [64], U8 [32] is needed"),
    "unknown dtype": (restate(dtype="float8"), "dtype 'float8' is not one of"),
    "not nested": (restate(nested_blocksize=None), "nested_absmax there"),
    "no offset": (restate(nested_offset=None), "nested_offset None is no number"),
    "infinite offset": (restate(nested_offset=float("inf")), "nested_offset inf is no number"),
    "bf16 scales": (restate(nested_dtype="bfloat16"), "only float32 is known"),
}


class TestRefused:
    @pytest.mark.parametrize("name", MUTATIONS)
    def test_what_does_not_fit_by_name(self, name: str, copy: Path) -> None:
        change, said = MUTATIONS[name]
        alter(copy, change)
        with pytest.raises(ArtifactError) as caught, open_base(copy):
            pass
        assert any(Q_PROJ in line and said in line for line in caught.value.details), caught.value
        assert "bf16" in caught.value.hint

    def test_every_finding_at_once(self, copy: Path) -> None:
        other = Q_PROJ.replace("q_proj", "v_proj")
        alter(copy, lambda tensors: [tensors.pop(Q_PROJ + ".absmax"), tensors.pop(other)])
        with pytest.raises(ArtifactError, match=r"\(and 1 more\)") as caught, open_base(copy):
            pass
        assert sorted(line.partition(":")[0] for line in caught.value.details) == [Q_PROJ, other]

    @pytest.mark.parametrize(
        ("said", "how"),
        [
            ({"quant_method": "gptq", "bits": 4}, "gptq"),
            ({"quant_method": "awq", "bits": 4}, "awq"),
            ({"quant_method": "mxfp4"}, "mxfp4"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
            ({"_load_in_8bit": True, "_load_in_4bit": False}, "bitsandbytes, 8 bits"),
            ({"quant_method": "bitsandbytes"}, "bitsandbytes, bits not said"),
            ({"bits": 3}, "an unknown method"),
        ],
    )
    def test_other_ways_of_storing_by_name(
        self, said: dict[str, Any], how: str, copy: Path
    ) -> None:
        (copy / "config.json").write_text(json.dumps({"quantization_config": said}))
        with pytest.raises(ArtifactError) as caught, open_base(copy):
            pass
        assert f"stored quantised ({how})" in caught.value.message
        assert "give the same model in bf16" in caught.value.hint

    def test_a_configuration_that_says_nothing_of_it(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        del config["quantization_config"]
        (copy / "config.json").write_text(json.dumps(config))
        said = "does not say that the weights are packed"
        with pytest.raises(ArtifactError, match=said), open_base(copy):
            pass

    def test_a_configuration_that_speaks_of_plain_weights(self, qwen: Artifact, copy: Path) -> None:
        shutil.copy(qwen.path / "model.safetensors", copy)
        said = "no tensor is packed.*remove quantization_config"
        with pytest.raises(ArtifactError, match=said), open_base(copy):
            pass

    def test_before_training_with_the_truth(self) -> None:
        known = preflight.Known(config={"quantization_config": SAID})
        (finding,) = preflight.quantised("qlora", known)
        assert finding.found == "the base is already quantised (bitsandbytes, 4 bits, nf4)"
        assert "to merge into, not to train from" in finding.allowed
        eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        known = preflight.Known(config={"quantization_config": eight})
        (finding,) = preflight.quantised("lora", known)
        assert finding.found == "the base is already quantised (bitsandbytes, 8 bits)"
        assert finding.allowed == "bfloat16"


def test_early_configurations_are_understood() -> None:
    early = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}}
    assert is_packed(early)
    assert stored(early) == "bitsandbytes, 4 bits"
    assert stored({}) is None
    assert stored({"quantization_config": {}}) is None


def test_another_scale_is_another_input(copy: Path) -> None:
    """What an interrupted run left is not gone on with when only a side tensor has changed."""
    found = set()
    for _ in range(2):
        with open_sources({"base": SourceRef(copy, "base")}) as sources:
            found.add(identify(Plan(()), sources, "model"))
        alter(copy, lambda tensors: tensors[Q_PROJ + ".absmax"].add_(1))
    assert len(found) == 2


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_it_is_refused_or_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No tensor lost, resized, retyped or renamed goes by unseen."""
    folder = tmp_path_factory.mktemp("mutated")
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    double = data.draw(st.booleans())
    write_packed(folder, {"a.weight": matrix, "b.weight": matrix}, compress_statistics=double)
    expected = restored(folder)
    tensors = load_file(folder / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["drop", "shorten", "widen", "retype", "rename", "reshape"]))
    one = tensors.pop(name)
    if kind == "shorten":
        tensors[name] = one.reshape(-1)[:-1].clone()
    elif kind == "widen":
        tensors[name] = torch.cat([one.reshape(-1), one.reshape(-1)[:1]])
    elif kind == "retype":
        tensors[name] = one.to(torch.float64 if one.dtype != torch.float64 else torch.float32)
    elif kind == "rename":
        tensors[name.replace(".weight", ".wait")] = one
    elif kind == "reshape":
        tensors[name] = one.reshape(1, -1).clone()
    save_file(tensors, folder / "model.safetensors")
    try:
        found = decode_all(folder, folder / "out")
    except ArtifactError:
        refused = True
    else:
        refused = False
        assert same(found, expected) == []
    assert refused == (kind != "reshape")
