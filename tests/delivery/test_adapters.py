"""Adapters as peft saves them: embeddings, layouts of versions, light ones."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.cli.config import compose_config
from flows.delivery.run_delivery import direct, plan
from flows.orchestration.flow_run import device_names
from tasks.audit.run import audit
from tasks.pipeline.locks import Needs, Patience, devices
from tasks.weights.files.reader import _read_header
from tests.audit.making import edit_json
from tests.delivery.conftest import Done
from tests.delivery.making import differing, merged_by_peft, with_rows
from tests.tiny import save_model, save_tokenizer
from tests.weights.making import ROWS, save, small_config, state_of, train

Run = Callable[..., Done]
MORE = 7
TOKENS = [ROWS, ROWS + 1]
BOTH = {"embed_tokens": TOKENS, "lm_head": TOKENS}

KEPT_TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
CASES: dict[str, tuple[bool, dict[str, Any], bool]] = {
    # base tied, what is trained, served tied
    "grown embedding, kept tied": (True, KEPT_TIED, True),
    "grown embedding, tied": (True, {"modules_to_save": ["embed_tokens"]}, False),
    "tokens of both": (False, {"trainable_token_indices": BOTH}, False),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The same model with and without tied embeddings."""
    folder, made = tmp_path_factory.mktemp("bases"), {}
    for tied in (True, False):
        config = small_config("qwen")
        config.tie_word_embeddings = tied
        made[tied] = save_model(folder / f"tied-{tied}", config, seed=1)
    return made


def trained(model: Any, folder: Path, **options: Any) -> Path:
    """Save an adapter on `model` with peft, all weights random, and a tokenizer of its rows."""
    from peft import LoraConfig
    from transformers import AutoTokenizer

    config = LoraConfig(
        r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options
    )
    save(train(model, config, seed=3), folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens([f"<new-{index}>" for index in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        name if at == 0 else pytest.param(name, marks=pytest.mark.slow)
        for at, name in enumerate(CASES)
    ],
)
def test_is_delivered_as_peft_merges_it(here, name, bases, tmp_path) -> None:
    tied, options, served_tied = CASES[name]
    source = trained(with_rows(bases[tied], MORE), tmp_path / "adapter", **options)
    done = here(f"source={source}", f"base={bases[tied]}", "merge.base=original")
    ours, theirs = state_of(tmp_path / "out"), merged_by_peft(bases[tied], source, MORE)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (served_tied, ROWS + MORE)
    assert ("lm_head.weight" in ours) is not served_tied
    assert differing(ours, theirs) == []
    assert not [finding for finding in done.summary["findings"] if finding["severity"] == "error"]


def test_a_delivery_without_an_engine_does_nothing_twice(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    """Each header is parsed once; no device is waited for, and there is nothing to plot."""
    folder, source = tmp_path / "base", tmp_path / "adapter"
    for kept, copied in ((base, folder), (adapter, source)):  # unknown to this process
        shutil.copytree(kept, copied)
    words = [f"source={source}", f"base={folder}", "merge.base=original", "paths.wait_s=0"]
    places = [f"paths.runs={tmp_path / 'runs'}", f"out={tmp_path / 'out'}"]
    composed = compose_config([*words, *places], config_name="deliver")
    parsed: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is _read_header.__wrapped__.__code__:
            parsed[str(frame.f_locals["path"])] += 1

    with devices(tmp_path / "runs", device_names(composed, Needs.DEVICE), Patience(0)):
        threading.setprofile(count)  # of threads that start from now on
        sys.setprofile(count)
        try:
            here(*words)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert parsed[str(source / "adapter_model.safetensors")] == 1
    assert set(parsed.values()) == {1}, parsed
    assert not list((tmp_path / "runs").rglob("*.html"))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_base_that_is_not_finite_is_refused_by_name(here, adapter, base, tmp_path, name) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "tiny-qwen"))
    tensors = state_of(folder)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    edit_json(source / "adapter_config.json", base_model_name_or_path=str(folder))
    done = here(f"source={source}", f"base={folder}", "merge.base=original", code=1)
    assert name in done.output
    assert not (tmp_path / "out").exists()


LOG = logging.getLogger("tests.deliver")


def test_a_light_adapter_is_kept_by_default(adapter: Path, base: Path, tmp_path: Path) -> None:
    """Updates are about half a step of bf16; `audit` measures the loss of a merge to nearest."""
    light = tmp_path / "light"
    shutil.copytree(adapter, light)
    tensors = load_file(light / "adapter_model.safetensors")
    tensors = {n: t.float() * (0.01 if "lora_B" in n else 1) for n, t in tensors.items()}
    save_file(tensors, light / "adapter_model.safetensors", metadata={"format": "pt"})
    arguments = [f"source={light}", f"base={base}", "merge.base=original", "smoke.engine=none"]
    places = [f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}"]
    direct(plan(compose_config([*arguments, *places], config_name="deliver"))[0], LOG, "here")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "out"))
    gained = nearest = update = 0.0
    for key in tensors:
        if "lora_A" in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            exact = 2.0 * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            wide = before[name].float()
            update += float((exact * exact).sum())
            gained += float(((after[name].float() - wide) * exact).sum())
            nearest += float((((wide + exact).bfloat16().float() - wide) * exact).sum())
    assert gained / update == pytest.approx(1, abs=0.05)
    assert nearest / update < 0.85
    (finding,) = [f for f in audit(light, base=base, values=True).findings
                  if f.code == "ADAPTER_ROUNDS_AWAY"]  # fmt: skip
    shares = [int(share) / 100 for share in re.findall(r"(\d+)%", finding.found)]
    assert shares[0] == pytest.approx(nearest / update, abs=0.05)
