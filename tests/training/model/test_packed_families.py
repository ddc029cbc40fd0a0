"""Packed rows of every family: losses, gradients, scores and router loss of transformers.

Of vision-language models, which are trained on text, nothing changes the towers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tasks.core.errors import ConfigError, TrainingError
from tasks.drift.fingerprint import ScorePrint
from tasks.serving.reference.load import from_folder
from tasks.training.engine.checkpoint import Progress
from tasks.training.job import Peft, TrainJob
from tasks.training.losses import objective
from tasks.training.model.build import add_adapter
from tasks.training.model.families import router_coefficient, why_padded
from tasks.training.model.packed_model import accept_packed_rows, require_same
from tasks.training.outputs import write_results
from tasks.training.passes import Passes
from tasks.training.tokens.rows import Dealt, Totals, pack, trial_row
from tasks.weights.model_class import NO_SDPA, auto_class, language_class, other_towers
from tests.settings import Settings
from tests.tiny import FAMILIES
from tests.training.datasets import alone, make_examples
from tests.vision import FAMILIES as VISION
from tests.vision import make_config

LENGTHS = [23, 9, 5, 40, 22, 1, 31]
WINDOW = {"sliding_window": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "mixtral": WINDOW,
    "phi3": WINDOW,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**WINDOW, "use_sliding_window": True},  # its window is in its mask alone
    "gemma2": {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
EAGER = {"gemma2"}  # sdpa leaves its attention cap out
DEFAULT = ("qwen2", "gemma2", "gpt2")


def default_or_slow(families: Iterable[str], default: Collection[str]) -> list[Any]:
    return [f if f in default else pytest.param(f, marks=pytest.mark.slow) for f in families]


def make_model(family: str, attention: str) -> Any:
    """Make a tiny real model in fp32 with varied weights."""
    torch.manual_seed(0)
    config = FAMILIES[family].config(**CHANGES.get(family, {}))
    kind = auto_class(config)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def require_same_gradients(
    mine: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    floor: float = 1.0,
    rounding: float = 1e-5,
) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = max(float(gradient.abs().max()), floor)
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=rounding * scale)


def require_rows_as_alone(own: Any, model: Any | None = None, rounding: float = 1e-5) -> Any:
    """Compare losses and gradients of rows with one pass per sequence; return the model."""
    examples = make_examples(LENGTHS, vocabulary=88)
    expected = alone(own, examples)
    weighted = torch.linspace(-1, 1, len(expected))
    theirs = gradients(own, expected @ weighted)
    model = model or own
    accept_packed_rows(model)
    require_same(model, trial_row(examples))
    packed = model(row=pack(examples, range(len(LENGTHS))))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
    require_same_gradients(gradients(model, packed @ weighted), theirs, rounding=rounding)
    return model


@pytest.mark.parametrize("family", default_or_slow(FAMILIES, DEFAULT))
def test_packed_sequences_have_the_losses_and_gradients_of_unpacked_ones(family: str) -> None:
    model = make_model(family, "eager" if family in EAGER else "sdpa")
    require_rows_as_alone(make_model(family, "eager"), model)
    examples = make_examples(LENGTHS, vocabulary=88)
    row = pack(examples, range(len(LENGTHS)))
    with torch.no_grad():
        before = model.eval()(row=row)
        for changed in (0, 3):
            ids = examples.ids.copy()
            start, end = examples.bounds[changed : changed + 2]
            ids[start:end] = (ids[start:end] + 5) % 88
            after = model(row=pack(replace(examples, ids=ids), range(len(LENGTHS))))
            others = row.owner != changed
            assert torch.equal(after[others], before[others]), "sequences do not mix"
            assert not torch.equal(after[~others], before[~others])


def test_a_wrong_packed_pass_is_noticed() -> None:
    """The self-check pads sequences that would mix, and refuses changed logits."""
    examples = make_examples([40, 40], vocabulary=88)
    model = make_model("llama", "sdpa")
    accept_packed_rows(model)
    leaky = replace(trial_row(examples), buckets=())
    mixed = replace(leaky, buckets=(pack(make_examples([80]), [0]).buckets))
    require_same(model, mixed)
    assert model.training
    assert model.padded_rows
    require_same(model, trial_row(examples))
    head = model.get_output_embeddings()
    model.set_output_embeddings(Doubling(head))
    with pytest.raises(TrainingError, match="rounding"):
        require_same(model, trial_row(examples))


class Doubling(torch.nn.Module):
    """A head with other results for whole sequences."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) * (2.0 if hidden.dim() == 3 else 1.0)


LINEAR = {
    "linear_conv_kernel_dim": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
PADDED: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "attention_chunk_size": 8, "head_dim": 8, "intermediate_size_mlp": 64,
        "num_local_experts": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "head_dim": 8,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, **LINEAR,
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **LINEAR},
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, **LINEAR,
    },
    "glm_moe_dsa": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 16, "index_head_dim": 16,
        "index_topk": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Families with ALiBi, convolutional, chunked, recurrent, linear or indexed attention."""
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
SIZES = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def test_sequences_of_eager_attention_do_not_see_each_other(tmp_path: Path) -> None:
    """Gpt-oss, which is loaded so, does not see in the positions where a sequence begins."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **SIZES, **GPT_OSS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    require_rows_as_alone(from_folder(None, tmp_path, dtype="float32").train())


@pytest.mark.parametrize("family", default_or_slow(PADDED, ["qwen3_5_text"]))
def test_padded_sequences_have_the_losses_and_gradients_of_unpadded_ones(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **PADDED[family]})
    assert why_padded(config.to_dict(), "sdpa")
    torch.manual_seed(0)
    require_rows_as_alone(AutoModelForCausalLM.from_config(config, dtype=torch.float32).train())


@pytest.mark.parametrize(("family", "used"), [("gpt_oss", "eager"), ("llama", "sdpa")])
def test_the_attention_that_trained_is_recorded(tmp_path: Path, family: str, used: str) -> None:
    """With another one, `deliver` would measure its rounding as drift."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "heldout.jsonl").touch()
    job = TrainJob(Settings(), tmp_path, "", tmp_path, tmp_path, tmp_path)
    write_results(job, metrics={}, progress=Progress(), measured=ScorePrint((), (), ""))
    assert json.loads((tmp_path / "train.json").read_text())["attn_implementation"] == used


def test_families_without_sdpa_are_those_of_transformers() -> None:
    """Loaded with sdpa, the default, they fail after data and base were prepared."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    families = {*NO_SDPA, *PADDED, "llama", "gemma3_text", "qwen3_moe"}
    classes = {name: AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[name]] for name in families}
    assert {name for name, each in classes.items() if not each._supports_sdpa} == NO_SDPA


def test_attention_that_leaves_out_a_cap_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        accept_packed_rows(make_model("gemma2", "sdpa"))
    assert "eager" in refused.value.hint


ROUTED = [23, 9, 40, 1, 31]


def own(model: Any, examples: Any, chosen: list[int]) -> Any:
    """Return transformers' output for a padded batch, with labels and router loss."""
    pieces = [[torch.from_numpy(x).long() for x in examples.sequence(i, 0)] for i in chosen]
    labels = [torch.where(bears > 0, ids, -100) for ids, bears in pieces]
    return model(
        input_ids=pad_sequence([ids for ids, _ in pieces], batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(x) for x in labels], batch_first=True),
        labels=pad_sequence(labels, batch_first=True, padding_value=-100),
        output_router_logits=True,
        use_cache=False,
    )


@pytest.mark.parametrize(("family", "checkpointed"), [("mixtral", True), ("qwen2_moe", False)])
def test_loss_and_gradients_are_those_of_transformers(family: str, checkpointed: bool) -> None:
    """One row is a whole step: its loss is the one that transformers returns for the batch."""
    examples = make_examples(ROUTED, vocabulary=88)
    examples.bears[examples.bounds[:-1]] = 0  # nothing predicts a first token
    model = make_model(family, "sdpa")
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.7
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen = list(range(len(ROUTED)))
    expected = own(model, examples, chosen)
    theirs = gradients(model, expected.loss)
    accept_packed_rows(model)
    assert router_coefficient(model.config.to_dict(), None) == 0.7
    passes = Passes(model, SimpleNamespace(device=torch.device("cpu")), objective("sft", {}), 0.7)
    loss = passes.loss(
        examples, Dealt(tuple(chosen)), Totals.of(examples.supervised, examples.lengths)
    )
    mine = gradients(model, loss.value)
    assert float(loss.measures["router_loss"]) == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    assert loss.value.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert len([name for name in mine if "mlp.gate.weight" in name]) == 2
    require_same_gradients(mine, theirs, floor=0.1)


SEEING = ("gemma4", "qwen3_5")


def make_seeing(family: str) -> Any:
    """Make a tiny vision-language model."""
    config = make_config(family)
    torch.manual_seed(0)
    return language_class(config).from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", default_or_slow(VISION, SEEING))
def test_rows_of_text_have_the_losses_and_gradients_of_the_whole_model(family: str) -> None:
    require_rows_as_alone(make_seeing(family), rounding=5e-5)


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize(
    "targets", ["all-linear", ("q_proj", "proj", "fc1", "embedding_projection")]
)
def test_no_adapter_is_beside_the_language(family: str, targets: Any) -> None:
    peft = Peft("lora", rank=4, alpha=8, target_modules=targets)
    peft = replace(peft, exclude_modules=("k_proj",))
    adapted = add_adapter(make_seeing(family), peft, head="tokens", dtype=torch.float32)
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any(".language_model." in name for name in names)
    assert not [name for name in names if ".language_model." not in name or "k_proj" in name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_head_of_no_family_is_a_tower() -> None:
    """A frozen head would not be trained, and no loss tells."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    wrong, count = [], 0
    for config in (CONFIG_MAPPING[kind] for kind in sorted(CONFIG_MAPPING)):
        auto = AutoModelForImageTextToText._model_mapping.get(config, ())
        for model_class in auto if isinstance(auto, tuple) else (auto,):
            try:
                with torch.device("meta"):
                    model = model_class._from_config(config(), dtype=torch.bfloat16)
            except Exception:  # incompatible defaults, missing libraries
                continue
            count += 1
            towers = other_towers(model)
            heads = {each.get_output_embeddings() for each in (model, model.get_decoder())} - {None}
            inside = [m for tower in towers for m in model.get_submodule(tower).modules()]
            wrong += [str(config) for module in inside if module in heads]
    assert wrong == []
    assert count >= 55


def test_the_chosen_class_keeps_the_towers(tmp_path: Path) -> None:
    """Qwen3.5's configuration stands for a text model, too, which would lose the vision tower."""
    model = make_seeing("qwen3_5")
    model.save_pretrained(tmp_path)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    config = make_config("qwen3_5")
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert language_class(config).__name__ == "AutoModelForCausalLM"
