"""Adapters that are damaged or do not fit the model are refused by tensor or setting."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError, ContractError, PlumblineError
from tasks.weights.lora import Pairing, changes, read_adapter, require_values
from tasks.weights.lora_config import parse_config
from tasks.weights.model import Model, live_model
from tasks.weights.model_class import auto_class
from tests.tiny import FAMILIES, FUSED, random_model
from tests.weights.making import Tensors, altered, merge, quiet, save, state_of, train

Edit = Callable[[Tensors], Any]

A0, B0 = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(FAMILIES["llama"].config()).float()


@pytest.fixture(scope="module")
def live(model: Any) -> Model:
    return live_model(model)


def _save(model: Any, folder: Path, **settings: Any) -> Path:
    from peft import LoraConfig

    return save(train(model, LoraConfig(r=4, lora_alpha=8, **settings)), folder)


@pytest.fixture(scope="module")
def good(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "adapter"
    return _save(model, folder, target_modules=["q_proj", "down_proj"])


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def test_every_setting_of_peft_is_known() -> None:
    """A new peft with a new setting fails here, before a user's merge does."""
    import dataclasses

    from peft import LoraConfig

    from tasks.weights.lora_config import _HARMLESS, _READ, _REFUSED

    groups = (_READ, _HARMLESS, _REFUSED)
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert {field.name for field in dataclasses.fields(LoraConfig)} == set().union(*groups)


def test_every_initialiser_of_peft_is_known() -> None:
    """Every initialiser is known either to change the base or not to."""
    from typing import Literal, get_args, get_origin, get_type_hints

    from peft import LoraConfig

    types = get_args(get_type_hints(LoraConfig)["init_lora_weights"])
    names = [name for kind in types if get_origin(kind) is Literal for name in get_args(kind)]
    plain = {name for name in names if not parse_config({**PLAIN, "init_lora_weights": name})[1]}
    assert plain == {"gaussian", "eva", "orthogonal", "mica"}
    for name in set(names) - plain:
        assert name in parse_config({**PLAIN, "init_lora_weights": name})[1][0]


SETTINGS: list[tuple[dict[str, Any], str]] = [
    # The setting of a good adapter that is changed, and a thing that a finding has to name.
    ({"target_modules": ["nothing"]}, "nothing"),
    ({"target_modules": ["q_proj", "o_proj", "down_proj"]}, "o_proj"),
    ({"target_modules": ["q_proj"]}, "down_proj"),
    ({"target_modules": ["q_proj", "down_proj", "norm"]}, "norm"),
    ({"target_modules": "("}, "target_modules"),
    ({"target_modules": None}, "target_modules"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"r": 8}, "q_proj"),
    ({"r": 0}, "r=0"),
    ({"r": 10**400}, "r=1000"),
    ({"rank_pattern": {"q_proj": 2}}, "q_proj"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"rank_pattern": {"(?i)q": 1}}, "rank_pattern"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ({"lora_alpha": 0}, "lora_alpha"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
    ({"use_dora": True}, "q_proj"),
    ({"use_dora": "yes"}, "use_dora='yes'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"bias": "some"}, "bias='some'"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "sorcery"}, "sorcery"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"use_new_thing": True}, "use_new_thing"),
    ({"modules_to_save": ["lm_head"]}, "lm_head"),
    ({"modules_to_save": ["proj"]}, "proj"),
    ({"trainable_token_indices": [5]}, "embed_tokens"),
    ({"trainable_token_indices": [1, 1]}, "trainable_token_indices"),
    ({"trainable_token_indices": {"wte": [1]}}, "wte"),
    ({"trainable_token_indices": {"model.norm": [1]}}, "norm"),  # no embedding
    ({"target_parameters": ["o_proj.weight"]}, "o_proj"),
    ({"use_dora": True, "target_parameters": ["o_proj.weight"]}, "o_proj"),
    ({"target_parameters": ["q_proj.weight"]}, "q_proj"),  # changed twice
]


def test_settings_that_do_not_fit_the_tensors_are_refused(good, live, tmp_path: Path) -> None:
    assert changes(read_adapter(good), live).findings == []
    missed = []
    for config, thing in SETTINGS:
        bad = altered(good, tmp_path / "bad", config=config)
        if not any(thing in line for line in changes(read_adapter(bad), live).findings):
            missed.append(config)
    assert missed == []
    name = "model.layers.0.self_attn.q_proj.weight"
    larger = replace(live, parameters={**live.parameters, name: (48, 32)})
    assert any(B0 in line for line in changes(read_adapter(good), larger).findings)
    several = altered(good, tmp_path / "bad", config={"lora_alpha": 0, "init_lora_weights": "x"})
    assert len(changes(read_adapter(several), live).findings) == 2


def _zeroed(half: str) -> Edit:
    """Zero one factor of every pair, with the sign of zero on some elements."""
    return lambda t: [t[key].neg_().mul_(0) for key in t if half in key]


def test_values_that_no_training_leaves(good: Path, tmp_path: Path) -> None:
    damages: list[tuple[Edit, str]] = [
        (_zeroed("lora_A"), "zero"),
        (_zeroed("lora_B"), "zero"),
        (lambda t: t[A0][0].fill_(math.nan), "32 elements"),
        (lambda t: t[B0][1, 1].fill_(-math.inf), "1 elements"),
    ]
    for edit, thing in damages:
        with pytest.raises(ContractError, match=thing):
            require_values(read_adapter(altered(good, tmp_path / "bad", edit)))
    for key in (A0, B0):  # a module that saw no data is no fault
        fine = altered(good, tmp_path / "fine", lambda tensors, key=key: tensors[key].zero_())
        require_values(read_adapter(fine))


def test_copies_of_a_tied_tensor_have_to_agree(tmp_path: Path) -> None:
    tied = random_model(FAMILIES["qwen2"].config(tie_word_embeddings=True)).float()
    folder = tmp_path / "good"
    wrapped = _save(tied, folder, target_modules=["q_proj"])
    path, key = wrapped / "adapter_model.safetensors", "base_model.model.lm_head.weight"
    table = tied.get_input_embeddings().weight.detach().clone()
    stored = {key: table, key.replace("lm_head", "model.embed_tokens"): table.clone()}
    save_file({**load_file(path), **stored}, path)
    for added in (0.0, 1.0):
        changed = altered(folder, tmp_path / "bad", lambda t, added=added: t[key].add_(added))
        total = changes(read_adapter(changed), live_model(tied))
        assert f"adapter:{key}" in total.dropped
        if added:
            with pytest.raises(ContractError, match="lm_head"):
                require_values(read_adapter(changed), total.copies)
        else:
            require_values(read_adapter(changed), total.copies)


def test_a_square_parameter_needs_the_version(tmp_path: Path) -> None:
    """Before peft 0.19.1 its factors lay the other way round."""
    model = random_model(FAMILIES["qwen3_moe"].config(moe_intermediate_size=16)).float()
    facts, settings = live_model(model), {"target_parameters": list(FUSED)}
    good = _save(model, tmp_path / "good", target_modules=["q_proj"], **settings)
    assert changes(read_adapter(good), facts).findings == []
    for version in ("0.18.1", ""):
        old = altered(good, tmp_path / "old", config={"peft_version": version})
        findings = changes(read_adapter(old), facts).findings
        name = "model.layers.{}.mlp.experts.gate_up_proj"
        assert [line.partition(":")[0] for line in findings] == [name.format(n) for n in (0, 1)]
        assert all('"peft_version": "0.19.1"' in line for line in findings)


def test_folders_without_one_adapter(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"adapter_model\.safetensors"):
        read_adapter(tmp_path)
    both = altered(good, tmp_path / "both")
    torch.save({}, both / "adapter_model.bin")
    with pytest.raises(ArtifactError, match=r"adapter_model\.bin"):
        read_adapter(both)


MANY_THINGS = {
    "target_modules": ["q_proj", "up_proj"],
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["model.norm"],
    "trainable_token_indices": [3, 9],
}
EXPERTS = {"target_modules": ["o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
RICH: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", MANY_THINGS),
    ("qwen2", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    ("gpt2", {"target_modules": ["c_attn", "wte"]}),
    ("mixtral", EXPERTS),
]
MUTATIONS: dict[str, Callable[[Tensors, str], object]] = {
    "drop": lambda t, key: t.pop(key),
    "shape": lambda t, key: t.update({key: t[key][:-1]}),
    "transpose": lambda t, key: t.update({key: t[key].transpose(0, -1)}),
    "zero": lambda t, key: t.update({key: t[key] * (".lora_magnitude" not in key)}),
    "nan": lambda t, key: t.update({key: t[key] * math.nan}),
    "rename": lambda t, key: t.update({key.replace("self_attn", "attn"): t.pop(key)}),
    "swap": lambda t, key: t.update({key.replace("lora_A", "lora_B"): t.pop(key)}),
    "dtype": lambda t, key: t.update({key: t[key].to(torch.int32)}),
    "again": lambda t, key: t.update({key.replace("base_model.model.", ""): t[key].clone()}),
    "empty": lambda t, key: t.update({key: torch.zeros(0)}),
    "named": lambda t, key: t.update({key.replace("lora_A.", "lora_A.default."): t.pop(key)}),
    "order": lambda t, key: t.update({key: t.pop(key)}),
}


@pytest.mark.parametrize(("family", "options"), RICH)
def test_a_mutated_adapter_is_an_error_or_the_same_merge(family, options, tmp_path: Path) -> None:
    base, bad, out = tmp_path / "base", tmp_path / "bad", tmp_path / "out"
    model = random_model(FAMILIES[family].config(tie_word_embeddings=family == "qwen2"))
    model.save_pretrained(base)
    good = _save(model.float(), tmp_path / "good", **options)
    merge(base, good, tmp_path / "expected")
    expected, keys = state_of(tmp_path / "expected"), sorted(state_of(good, "adapter_model"))

    @settings(deadline=None, max_examples=15)
    @given(key=st.sampled_from(keys), kind=st.sampled_from(sorted(MUTATIONS)))
    def check(key: str, kind: str) -> None:
        altered(good, bad, lambda tensors: MUTATIONS[kind](tensors, key))
        shutil.rmtree(out, ignore_errors=True)
        try:
            merge(base, bad, out)
        except PlumblineError:
            return
        merged = state_of(out)
        assert all(torch.equal(merged[name], expected[name]) for name in expected), kind

    check()


def _model() -> Any:
    with torch.device("meta"), quiet():
        config = FAMILIES["llama"].config()
        return auto_class(config).from_config(config, dtype=torch.bfloat16)


def _by_peft(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the shapes that peft would save."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with quiet(), torch.device("meta"):
        config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options)
        state = get_peft_model_state_dict(get_peft_model(_model(), config))
    raw = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return raw, {name: tuple(tensor.shape) for name, tensor in state.items()}


class _Header:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, "BF16"


def _pairing(live: Model, raw: dict[str, Any], saved: dict[str, Any]) -> Pairing:
    config, findings = parse_config({**raw, "peft_type": "LORA"})
    assert not findings
    return Pairing(config, live, {key: _Header(shape) for key, shape in saved.items()})


NAMES = st.sampled_from(
    ["q_proj", "k_proj", "up_proj", "0.mlp.down_proj", "layers.1.self_attn.o_proj", "mlp.up_proj",
     "model.layers.0.self_attn.v_proj", "lm_head", "embed_tokens"]
)  # fmt: skip
REGEXES = st.sampled_from(
    [r".*_proj", r".*\.1\..*proj", r"model\.layers\.0\.mlp\.\w+_proj", r"lm_head"]
)
LISTS = st.lists(NAMES, min_size=1, max_size=4, unique=True)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    target=st.one_of(LISTS, REGEXES, st.just("all-linear")),
    exclude=st.one_of(st.none(), LISTS, REGEXES),
    layers=st.one_of(st.none(), st.sampled_from([0, 1, [1], [0, 1]])),
    pattern=st.sampled_from([None, "layers", ["layers", "h"]]),
    ranks=st.dictionaries(NAMES, st.integers(1, 5), max_size=3),
)
def test_the_rules_of_matching(target, exclude, layers, pattern, ranks) -> None:
    options = {"target_modules": target, "exclude_modules": exclude, "rank_pattern": ranks}
    if isinstance(target, list) and layers is not None:
        options |= {"layers_to_transform": layers, "layers_pattern": pattern}
    live = live_model(_model())
    if not _pairing(live, {"r": 4, "lora_alpha": 6, **options}, {}).pieces:
        with pytest.raises(ValueError, match="targeted|not found|excluded"):  # peft's own
            _by_peft(options)
        return
    raw, saved = _by_peft(options)
    saved = {key: shape for key, shape in saved.items() if ".base_layer." not in key}
    pairing = _pairing(live, raw, saved)
    assert not pairing.findings
    assert pairing.wanted == saved
