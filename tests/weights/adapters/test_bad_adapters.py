"""Adapters that are damaged: every finding is told, and only the right merge passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import save_file

from tasks.errors import ArtifactError, ContractError, PlumblineError
from tasks.weights.adapters.changes import Changes, changes
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.read import read_adapter
from tasks.weights.adapters.values import require_values, value_findings
from tests.weights.adapters.making import base_model, opened, our_merge, save, tensors_of, train

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    return base_model("llama")


@pytest.fixture(scope="module")
def live(model: Any) -> LiveModel:
    return live_model(model)


@pytest.fixture(scope="module")
def good(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    return save(train(model, config), tmp_path_factory.mktemp("good") / "adapter")


def altered(
    good: Path, to: Path, edit: Callable[[Tensors], Any] = id, config: dict[str, Any] | None = None
) -> Path:
    """A copy of an adapter with its tensors edited in place and settings replaced."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    tensors = tensors_of(read_adapter(good))
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, to / "adapter_model.safetensors")
    raw = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**raw, **(config or {})}))
    return to


def _found(folder: Path, live: LiveModel) -> Changes:
    return changes(opened(folder), live)


def _without(key: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(key)


def _put(key: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({key: value})


def _rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


LEGACY = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_without(Q0.format("A")), ["covers only 7 of the 8", f"{Q0.format('A')}: missing"]),
        (lambda t: [t.pop(k) for k in list(t) if ".1." in k], ["covers only 4 of the 8"]),
        (lambda t: t.clear() or t.update(x=torch.ones(1)), ["matches nothing", "x: unexpected"]),
        (
            _put(Q0.format("A"), torch.ones(2, 32)),
            ["is [2, 32], the model and the rank want [4, 32]"],
        ),
        (_put(Q0.format("B"), torch.ones(32, 4, dtype=torch.int8)), ["I8 [32, 4] is no float"]),
        (_put(Q0.format("B"), torch.zeros(0)), ["saved under ZeRO-3 or FSDP"]),
        (_put("base_model.model.model.norm.weight", torch.ones(32)), ["norm.weight: unexpected"]),
        (_put(LEGACY, torch.ones(4, 32)), ["experts one by one"]),
        (
            _rename(Q0.format("A"), Q0.format("A").replace("lora_A.", "lora_A.default.")),
            ["carries an adapter's name", "missing"],
        ),
        (_rename(Q0.format("A"), Q0.format("A")[len("base_model.model.") :]), ["start with"]),
        (
            _rename(Q0.format("A"), Q0.format("A").replace("q_proj", "q_porj")),
            ["near: ", "missing"],
        ),
    ],
)
def test_findings(
    edit: Callable[[Tensors], Any], words: list[str], good: Path, live: LiveModel, tmp_path: Path
) -> None:
    found = _found(altered(good, tmp_path / "bad", edit), live)
    text = "\n".join(found.findings)
    assert all(one in text for one in words), text
    with pytest.raises(ContractError, match="do not fit"):
        found.require()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ["nothing"]}, "matches nothing: the model has none"),
        ({"target_modules": ["q_proj", "o_proj", "down_proj"]}, "covers only 8 of the 12"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight: unexpected"),
        ({"r": 8}, "is [4, 32], the model and the rank want [8, 32]"),
        ({"rank_pattern": {"q_proj": 2}}, "want [2, 32]"),
        ({"use_dora": True}, "lora_magnitude_vector: missing"),
        ({"lora_bias": True}, "lora_bias needs a bias"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight: missing"),
        ({"trainable_token_indices": [5]}, "trainable_tokens_delta: missing"),
        ({"trainable_token_indices": [96]}, "trained token 96 is outside its 96 rows"),
        ({"trainable_token_indices": {"wte": [1]}}, "the model has no ['wte']"),
        ({"target_modules": ["q_proj", "down_proj", "norm"]}, "norm: targeted, but no linear"),
        ({"target_parameters": ["o_proj.weight"]}, "o_proj.lora_A.weight: missing"),
        ({"use_dora": True, "target_parameters": ["o_proj.weight"]}, "takes neither DoRA"),
        ({"target_parameters": ["q_proj.weight"]}, "q_proj.weight: changed twice, by"),
        ({"modules_to_save": ["proj"]}, "down_proj.weight: changed twice, by"),
        ({"lora_alpha": 0, "init_lora_weights": "pissa"}, "lora_alpha=0"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_settings_that_do_not_fit(
    config: dict[str, Any], words: str, good: Path, live: LiveModel, tmp_path: Path
) -> None:
    found = _found(altered(good, tmp_path / "bad", config=config), live)
    assert words in "\n".join(found.findings)


def test_every_finding_of_a_configuration_at_once(
    good: Path, live: LiveModel, tmp_path: Path
) -> None:
    bad = altered(good, tmp_path / "bad", config={"lora_alpha": 0, "init_lora_weights": "pissa"})
    assert len(_found(bad, live).findings) == 2


def test_a_base_of_another_shape(good: Path, live: LiveModel) -> None:
    from dataclasses import replace

    from tasks.contract import Expected

    name = "model.layers.0.self_attn.q_proj.weight"
    other = replace(live, tensors={**live.tensors, name: Expected(name, (48, 32))})
    assert f"{Q0.format('B')}: is [32, 4], the model and the rank want [48, 4]" in (
        _found(good, other).findings
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t[Q0.format("B")].zero_(), "all zero"),
        (lambda t: t[Q0.format("B")].neg_().mul_(0), "all zero"),
        (lambda t: t[Q0.format("A")].zero_(), "all zero"),
        (lambda t: t[Q0.format("A")][0].fill_(float("nan")), "32 elements are NaN or infinite"),
        (lambda t: t[Q0.format("B")][1, 1].fill_(float("-inf")), "1 elements are NaN"),
    ],
)
def test_values(edit: Callable[[Tensors], Any], words: str, good: Path, tmp_path: Path) -> None:
    bad = read_adapter(altered(good, tmp_path / "bad", edit))
    assert any(words in one for one in value_findings(bad))
    with pytest.raises(ContractError, match=words):
        require_values([bad])


def test_a_copy_that_is_none(tmp_path: Path) -> None:
    """Tied embeddings are stored under both names; neither may silently win."""
    tied = base_model("qwen2")
    config = LoraConfig(r=4, target_modules=["q_proj"])
    folder = save(train(tied, config), tmp_path / "good", save_embedding_layers=True)
    key = "base_model.model.lm_head.weight"
    for at, good in ((0.0, True), (1.0, False)):
        other = altered(folder, tmp_path / "bad", lambda t, at=at: t[key].add_(at))
        found = _found(other, live_model(tied))
        assert f"adapter:{key}" in [one.source for one in found.dropped]
        if good:
            require_values([read_adapter(other)], found.copies)
        else:
            with pytest.raises(ContractError, match="is not the same as"):
                require_values([read_adapter(other)], found.copies)


def test_a_stray_pair_on_a_tied_head(tmp_path: Path) -> None:
    tied = base_model("qwen2")
    config = LoraConfig(r=4, target_modules=["q_proj"])
    folder = save(train(tied, config), tmp_path / "good", save_embedding_layers=True)
    key = "base_model.model.lm_head.lora_A.weight"
    bad = altered(folder, tmp_path / "bad", _put(key, torch.ones(4, 32)))
    assert any(f"{key}: unexpected" in one for one in _found(bad, live_model(tied)).findings)


def test_good_values(good: Path) -> None:
    require_values([read_adapter(good)])


def test_no_adapter(tmp_path: Path, good: Path, live: LiveModel) -> None:
    with pytest.raises(ArtifactError, match="no PEFT adapter"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="adapter_model.safetensors: absent"):
        read_adapter(tmp_path)
    assert changes([], live).findings == ("no adapter given",)
    assert "two adapters have the same name" in changes(opened(good) * 2, live).findings


def test_two_kinds_of_file(good: Path, tmp_path: Path) -> None:
    both = altered(good, tmp_path / "both")
    torch.save({}, both / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="stray weight file"):
        read_adapter(both)


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight: float, good: Path, live: LiveModel) -> None:
    assert any(
        "number other than 0" in one for one in changes(opened(good, weight=weight), live).findings
    )


STORED = {"modules_to_save": ["lm_head"]}
TOKENS = {"trainable_token_indices": [3, 4]}
PAIRS = [
    (STORED, STORED, 1.0, "lm_head.weight: stored whole by one adapter, changed by another"),
    (STORED, {"target_modules": ["lm_head"]}, 1.0, "changed by another"),
    ({"target_modules": ["lm_head"]}, STORED, 1.0, "changed by another"),
    (TOKENS, {"trainable_token_indices": [4, 5]}, 1.0, "two adapters replace row 4"),
    ({"use_dora": True}, {}, 1.0, "DoRA normalises the base's own weight"),
    ({}, STORED, 0.5, "is stored whole, so weight 0.5 means nothing"),
    ({}, TOKENS, 0.5, "is stored whole, so weight 0.5 means nothing"),
]


@pytest.mark.parametrize(("one", "other", "weight", "words"), PAIRS)
def test_adapters_that_exclude_each_other(
    one: dict[str, Any],
    other: dict[str, Any],
    weight: float,
    words: str,
    model: Any,
    tmp_path: Path,
) -> None:
    adapters = []
    for at, extra in enumerate((one, other)):
        config = LoraConfig(r=4, **{"target_modules": ["q_proj"], **extra})
        folder = save(train(model, config, seed=at), tmp_path / str(at))
        adapters.append((read_adapter(folder, f"a{at}"), weight if at else 1.0))
    assert any(words in text for text in changes(adapters, live_model(model)).findings)


def _mutations(tensors: Tensors, data: st.DataObject) -> str:
    key = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["drop", "shape", "transpose", "zero", "nan", "rename", "swap",
                                      "dtype", "again", "order", "empty"]))  # fmt: skip
    tensor = tensors[key]
    match kind:
        case "drop":
            del tensors[key]
        case "shape":
            tensors[key] = tensor[:-1]
        case "transpose":
            tensors[key] = tensor.transpose(0, -1)
        case "zero" if ".lora_" in key:  # of a bias or a token row it may be meant
            tensors[key] = torch.zeros_like(tensor)
        case "nan":
            tensors[key] = tensor * float("nan")
        case "rename":
            tensors[key.replace("self_attn", "attn").replace("mlp", "ffn")] = tensors.pop(key)
        case "swap":
            other = data.draw(st.sampled_from(["lora_A", "lora_B"]))
            tensors[key.replace("lora_A", other).replace("lora_B", other)] = tensors.pop(key)
        case "dtype":
            tensors[key] = tensor.to(torch.int32)
        case "again":
            tensors[key.replace("base_model.model.", "")] = tensor.clone()
        case "empty":
            tensors[key] = torch.zeros(0)
        case "order":
            items = list(tensors.items())
            tensors.clear()
            tensors.update(reversed(items))
    return kind


RICH: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "many things": (
        "qwen2",
        {
            "target_modules": ["q_proj", "up_proj"],
            "use_dora": True,
            "bias": "all",
            "modules_to_save": ["model.norm"],
            "trainable_token_indices": [3, 9],
        },
    ),
    "tied": ("qwen2", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "wte"], "lora_bias": False}),
    "experts": (
        "mixtral",
        {"target_modules": ["o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    ),
}


@pytest.mark.parametrize("case", RICH)
def test_an_error_or_the_same_result(case: str, tmp_path: Path) -> None:
    family, options = RICH[case]
    model = base_model(family)
    live = live_model(model)
    good = save(train(model, LoraConfig(r=4, **options)), tmp_path / "good")
    expected = our_merge(model, opened(good), live)

    @settings(deadline=None, max_examples=25)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        bad = altered(good, tmp_path / "bad", lambda tensors: _mutations(tensors, data))
        try:
            adapters = opened(bad)
            found = changes(adapters, live)
            found.require()
            require_values([adapters[0][0]], found.copies)
            merged = our_merge(model, adapters, live)
        except PlumblineError:
            return
        assert all(torch.equal(merged[name], expected[name]) for name in expected)

    check()
