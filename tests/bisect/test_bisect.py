"""`plumbline bisect` finds the module in which two models part, and takes no noise for one."""

from __future__ import annotations

import json
import logging
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.bisect.compare import places
from tasks.bisect.report import REDO, Report
from tasks.bisect.run import Options, bisect, compare_folders
from tasks.bisect.tensors import compare
from tasks.evaluation.scoring import ModelRef
from tests.audit.making import edit_json
from tests.commands import command, environment
from tests.tiny import make_tokenizer, tiny

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaForCausalLM", {"num_hidden_layers": 4}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", "GPT2LMHeadModel", {"num_hidden_layers": 3}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {"num_hidden_layers": 3, "num_local_experts": 4}),
}
"""Configuration, class and changes: plain, with biases, tied with fused layers, with experts."""
IDS = [random.Random(seed).choices(range(3, 96), k=20) for seed in range(4)]
KINDS = ("other", "transposed", "scaled", "zero", "swapped")


def make(family: str, seed: int, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Return a model whose layers all matter, unlike fresh ones."""
    import transformers

    config, kind, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(tiny(config, **{**own, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fan_in = parameter.shape[-2 if family == "gpt2" and ".h." in name else -1]
                parameter.normal_(std=1.5 / fan_in**0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def plant(model: Any, other: Any, kind: str, chooser: random.Random) -> tuple[str, str]:
    """Plant a fault in a random tensor. Returns the names of its module and of the tensor.

    Args:
        model: gets the fault.
        other: another model of the same shapes.
        kind: one of `KINDS`.
        chooser: chooses the tensor.
    """
    tensors = [
        (place, name, parameter)
        for place, module in places(model).items()
        for name, parameter in module.named_parameters(recurse=False)
        if _suits(kind, place, parameter)
    ]
    place, name, parameter = chooser.choice(tensors)
    with torch.no_grad():
        if kind == "other":
            parameter.copy_(places(other)[place].get_parameter(name))
        elif kind == "transposed":
            parameter.copy_(parameter.T.clone())
        elif kind == "scaled":
            parameter.mul_(chooser.choice((0.5, 1.5, 2.0)))
        elif kind == "zero":
            parameter.zero_()
        else:
            heads = list(parameter.reshape(-1, 8, parameter.shape[-1]).unbind(0))
            parameter.copy_(torch.cat([*heads[1:], heads[0]]))
    return place, name


def _suits(kind: str, place: str, parameter: Any) -> bool:
    if kind == "transposed":
        return parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]
    if kind == "swapped":
        return place.endswith(("q_proj", "k_proj", "v_proj")) and parameter.dim() == 2
    return parameter.dim() > 1 or kind != "scaled"


def quantised(value: torch.Tensor, bits: str, block: int) -> torch.Tensor:
    """Round to a format with one scale for `block` numbers of a row."""
    parts = value.reshape(-1, block)
    top = parts.abs().amax(1, keepdim=True)
    if bits == "fp8":
        rounded = (parts / top * 448).to(torch.float8_e4m3fn).float() * top / 448
    else:
        most = 127 if bits == "int8" else 7
        rounded = (parts / top * most).round() * top / most
    return rounded.reshape(value.shape)


def examine(
    a: Path,
    b: Path,
    *,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    adapter: Path | None = None,
) -> Report:
    """Bisect two folders in this process, on `IDS`; `adapter` lies on top of a."""
    first = ModelRef(a, adapter, dtype=dtypes[0], device="cpu")
    second = ModelRef(b, dtype=dtypes[1], device="cpu")
    report = compare_folders(first, second, Options(ids=IDS), None)
    assert report.text()
    return report


Save = Callable[..., Path]
SERVED = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads that vLLM's attention on a CPU takes."""


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a model in a new folder."""
    count = iter(range(1000))

    def saved(model: Any, **how: Any) -> Path:
        folder = tmp_path / f"model{next(count)}"
        model.save_pretrained(folder, **how)
        return folder

    return saved


def test_planted_fault_and_noise(save: Save) -> None:
    """One planted tensor is found by name and cause; bf16 against fp32 is noise."""
    a = save(make("llama", 1))
    broken = make("llama", 1)
    with torch.no_grad():
        broken.model.layers[2].mlp.down_proj.weight.mul_(1.5)
    report = examine(a, save(broken))
    assert (report.verdict, report.exit_status) == ("differs", 1)
    assert [row.module for row in report.divergences] == ["model.layers.2.mlp.down_proj"]
    assert "times 1.5" in report.divergences[0].cause
    upcast = examine(a, a, dtypes=("bfloat16", "float32"))
    assert (upcast.verdict, upcast.exit_status, upcast.divergences) == ("noise", 0, [])


def test_swapped_matrices_of_an_untrained_model_are_a_fault(save: Save) -> None:
    model = make("llama", 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3 if parameter.dim() > 1 else 1.0)  # hardly moves any logit
    a = save(model)
    mlp = model.model.layers[2].mlp
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = (
        mlp.up_proj.weight.data, mlp.gate_proj.weight.data
    )  # fmt: skip
    report = examine(a, save(model))
    assert not report.limit
    assert "mixed up" in report.divergences[0].cause
    assert (report.verdict, report.exit_status) == ("differs", 1)


@pytest.mark.slow
def test_a_fault_in_what_vllm_serves_is_found(save: Save, tmp_path: Path) -> None:
    """vLLM's fused layers are compared under transformers' names."""
    a, broken = save(make("llama", 1, **SERVED)), make("llama", 1, **SERVED)
    with torch.no_grad():
        broken.model.layers[2].self_attn.k_proj.weight.mul_(1.5)
    served = {"right": a, "wrong": save(broken)}
    for folder in served.values():
        make_tokenizer().save_pretrained(folder)
    reports = {
        name: bisect(
            ModelRef(a, dtype="bfloat16"),
            ModelRef(folder, dtype="bfloat16"),
            Options(ids=IDS, engine="vllm"),
            log=logging.getLogger(),
            log_path=tmp_path / f"{name}.log",
        )
        for name, folder in served.items()
    }
    assert reports["right"].divergences == []
    parted = [row.module for row in reports["wrong"].divergences]
    assert parted == ["model.layers.2.self_attn.k_proj"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trial", range(3))
def test_random_fault_is_found(family: str, trial: int, save: Save) -> None:
    """A fault above the gate is found, and named as the only one; below the gate it is noise."""
    kinds = [kind for kind in KINDS if not (family == "gpt2" and kind == "swapped")]
    chooser = random.Random(f"{family}{trial}")
    broken = make(family, 1)
    place, name = plant(broken, make(family, 2), kinds[2 * trial % len(kinds)], chooser)
    if (family, place) == ("gpt2", "lm_head"):
        place = "transformer.wte"  # they are tied: one tensor, first used there
    report = examine(save(make(family, 1)), save(broken))
    assert report.divergences[0].module == place
    assert f"{place}.{name}" in {gap.name for gap in report.divergences[0].tensors}
    structural = report.divergences[0].hint == REDO
    assert report.verdict == ("differs" if report.limit or structural else "below")
    assert report.drift is not None
    if report.drift["mean_kl"] > 1e-4:
        assert report.exit_status == 1
    tied = {"lm_head"} if place == "transformer.wte" else set()
    assert {row.module for row in report.divergences} - tied == {place}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_rounding_is_no_divergence(family: str, save: Save) -> None:
    """The same folder, an upcast and a cast are equal or noise, whatever the gate says."""
    fine = make(family, 1, dtype=torch.float32)
    a, cast = save(fine), save(fine.to(torch.bfloat16))
    assert examine(cast, cast).verdict == "same"
    for first, second, dtypes in (
        (a, cast, ("float32", "bfloat16")), (cast, a, ("bfloat16", "float32")),
    ):  # fmt: skip
        report = examine(first, second, dtypes=dtypes)
        assert (report.verdict, report.divergences) == ("noise", [])


@pytest.mark.slow
def test_quantised_copy_is_rounding(save: Save) -> None:
    """A rounded copy has no divergent layer; one broken tensor in it is still found."""
    a, rounded = make("llama", 1), make("llama", 1)
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, torch.nn.Linear) and module is not rounded.lm_head:
                weight = module.weight.float()
                module.weight.copy_(quantised(weight, "fp8", weight.shape[1]))
    first = save(a)
    report = examine(first, save(rounded))
    assert report.limit, "the copy has to be above the gate"
    assert (report.verdict, report.exit_status, report.divergences) == ("rounding", 0, [])
    with torch.no_grad():
        broken = rounded.model.layers[1].self_attn.o_proj.weight
        broken.copy_(broken.T.clone())
    parted = [row.module for row in examine(first, save(rounded)).divergences]
    assert parted == ["model.layers.1.self_attn.o_proj"]


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "key", "module"),
    [
        (ROPE, "rope_theta", "rotary"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps", "input_layernorm"),
    ],
)
def test_configuration_is_named(changes: dict[str, Any], key: str, module: str, save: Save) -> None:
    """Equal weights and another configuration: the first module that it changes, and the key."""
    a, b = save(make("llama", 1)), save(make("llama", 1))
    edit_json(b / "config.json", **changes)
    report = examine(a, b)
    assert (report.verdict, report.exit_status) == ("differs", 1)
    first = report.divergences[0]
    assert module in first.module
    assert first.where in ("output", "input")
    assert key in first.cause
    assert any(key in line for line in report.config)


@pytest.mark.slow
def test_adapters(save: Save, tmp_path: Path) -> None:
    """An unmerged adapter equals its merge; without it the difference has the adapter's rank."""
    from peft import LoraConfig, get_peft_model

    base = save(make("qwen2", 1))
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    peft = get_peft_model(make("qwen2", 1), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    adapter = tmp_path / "adapter"
    peft.save_pretrained(adapter)
    merged = save(peft.merge_and_unload())
    report = examine(base, merged, adapter=adapter)
    assert (report.verdict, report.divergences) == ("noise", [])
    missing = examine(merged, base)
    assert missing.verdict == "differs"
    first = missing.divergences[0]
    assert first.module == "model.layers.0.self_attn.q_proj"
    assert "has rank 4" in first.cause
    assert {row.module.rpartition(".")[2] for row in missing.divergences} == {"q_proj", "down_proj"}


@pytest.mark.slow
def test_command(save: Save, tmp_path: Path) -> None:
    """The command: exit statuses, the report in a file, and mistakes all at once."""
    from tests.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    size, out = len(tokenizer), tmp_path / "report.json"
    a, other = (save(make("qwen2", seed, vocab_size=size)) for seed in (1, 2))
    for folder in (a, other):
        tokenizer.save_pretrained(folder)

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            command("bisect", *arguments), env=environment(), timeout=600, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    status, text = run(f"a={a}", f"b={a}")
    assert status == 0, text
    status, text = run(f"a={a}", f"b={other}", f"out={out}")
    assert status == 1, text
    assert json.loads(out.read_text())["first"]["module"] == "model.embed_tokens"
    status, text = run(f"a={tmp_path}/none", f"b={tmp_path}", f"out={tmp_path}/x")
    assert status == 2
    assert all(thing in text for thing in (f"{tmp_path}/none", "config.json", "out"))
    status, text = run(f"a={a}", f"b={save(make('qwen2', 1))}")
    assert (status, f"vocab_size {size} and 96" in text) == (2, True)


ROUNDING = 1.66e-3
"""Root mean square of bfloat16's rounding errors, relative to the numbers."""


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a matrix whose rows and columns have different sizes, as trained ones have."""
    torch.manual_seed(seed)
    sizes = torch.exp(0.5 * torch.randn(rows, 1) + 0.3 * torch.randn(1, columns))
    return torch.randn(rows, columns) / columns**0.5 * sizes


def change_of_rank(like: torch.Tensor, rank: int, size: float) -> torch.Tensor:
    """Return a change of low rank, `size` times as long as the weight."""
    change = torch.randn(like.shape[0], rank) @ torch.randn(rank, like.shape[1])
    return change * (size * like.float().norm() / change.norm())


@pytest.mark.parametrize(("shape", "seed"), [((128, 128), 0), ((256, 128), 1), ((512, 1024), 0)])
def test_rounding_is_rounding(shape: tuple[int, int], seed: int) -> None:
    fine = weight(*shape, seed)
    stored = fine.bfloat16()
    change = change_of_rank(stored, 8, 0.05)
    merged = (stored.float() + change).bfloat16()
    pairs = {
        "cast": (fine, stored),
        "half": (fine, fine.half()),
        "upcast": (stored, fine),
        "merged in bfloat16": (merged, stored + change.bfloat16()),
        "int8": (fine, quantised(fine, "int8", shape[1])),
        "int8 in bfloat16": (stored, quantised(stored.float(), "int8", shape[1]).bfloat16()),
        "fp8": (stored, quantised(stored.float(), "fp8", shape[1]).bfloat16()),
        "int4": (stored, quantised(stored.float(), "int4", 128).bfloat16()),
    }
    wrong = [name for name, (a, b) in pairs.items() if compare(name, a, b).different]
    assert wrong == []


@pytest.mark.parametrize("equal", [200, 500])
def test_equal_rows_are_one(equal: int) -> None:
    """Tokens that were added share one embedding, and so their rounding errors."""
    fine = weight(512, 256)
    fine[-equal:] = fine[0]
    assert compare("embedding", fine, fine.bfloat16()).rounding == "bfloat16"


@pytest.mark.parametrize(
    ("side", "rank", "size"), [(256, 4, 0.3), (256, 16, 0.5), (1024, 16, 0.1), (1024, 16, 2.4)]
)
def test_a_change_below_a_step_is_no_rounding(side: int, rank: int, size: float) -> None:
    """An adapter of `size` rounding errors, merged into bfloat16 or left out there.

    The largest could be taken for eight bits.
    """
    stored = weight(side, side).bfloat16()
    merged = (stored.float() + change_of_rank(stored, rank, size * ROUNDING)).bfloat16()
    for a, b in ((stored, merged), (merged, stored)):
        assert compare("q_proj", a, b).different
