"""`values=true`: classes of transformers that only the child process knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tasks.audit.run import audit
from tests.audit.making import codes, edit_json
from tests.tiny import tiny


@pytest.mark.slow
def test_experts_of_a_class_that_is_not_in_the_table(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = AutoModelForCausalLM.from_config(tiny("Qwen3Moe", **sizes, decoder_sparse_step=1))
    root = tmp_path / "it"
    model.save_pretrained(root)
    assert audit(root, values=True).ok
    state = load_file(root / "model.safetensors")
    lost = next(key for key in state if "experts" in key)
    del state[lost]
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    missing = [
        finding for finding in audit(root, values=True).findings if finding.code == "TENSOR_MISSING"
    ]
    assert [finding.tensor for finding in missing] == [lost]
    edit_json(root / "config.json", model_type="nobodys", architectures=["NobodysForCausalLM"])
    assert codes(root, values=True)["CONTRACT_UNKNOWN"] == "warning"
