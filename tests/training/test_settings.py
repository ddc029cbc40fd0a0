"""Settings, DeepSpeed's configuration and the memory estimate, without torch."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.defaults import COMPUTED
from tasks.config.learning import Resume
from tasks.core.errors import ConfigError, StageProcessError, TrainingError
from tasks.rl import settings
from tasks.train import _Events, _launch
from tasks.training import job
from tasks.training.engine.failure import collective_timeout_s
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Peft, TrainJob, Zero
from tasks.training.memory.estimate import HOLES, LIBRARIES, adapter_weights, estimate, on_node
from tasks.training.memory.sizes import Sizes
from tests.settings import Batch, Launch, Optim, Settings

QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    settings = Settings(
        peft=Peft("qlora", target_modules=("q_proj",)), zero=Zero(1), batch=Batch(max_steps=3)
    )
    paths = {name: tmp_path / name for name in ("base", "data", "out", "checkpoints")}
    job = TrainJob(settings=settings, base_digest="d", **paths)
    job.write(tmp_path / "job.json")
    assert asdict(TrainJob.read(tmp_path / "job.json")) == asdict(job)


def test_settings_from_sections() -> None:
    sizes = {"micro_batch_size": 1, "global_batch_size": 3, "gradient_checkpointing": False}
    settings = Settings.from_sections(
        train={"objective": "sft", "lr": 0.5, "max_len": 7, "nproc": 3, "threads": 2, **sizes},
        peft={"kind": "lora", "target_modules": ["q_proj", "v_proj"]},
        zero={"stage": 3},
        model={"kind": "toy", "dtype": "float32", "path": None},
        seed=11,
    )
    assert settings.optim.lr == 0.5
    assert settings.batch.max_len == 7
    assert (settings.launch.nproc, settings.launch.threads, settings.world_size) == (3, 2, 3)
    assert settings.peft.target_modules == ("q_proj", "v_proj")
    assert (settings.zero.stage, settings.dtype, settings.seed) == (3, "float32", 11)
    train = {"lrr": 1, "lr": 0.5, "max_len": 7, "nproc": 3, **sizes}
    with pytest.raises(ConfigError, match=r"train.lrr is not a setting"):
        Settings.from_sections(train=train, peft={}, zero={}, model={}, seed=0)


COMPUTED_FIELDS = {
    job.Optim: {"lr"},
    job.Batch: {"micro_batch_size", "global_batch_size", "max_len"},
    job.Launch: {"nproc"},
    settings.Rollout: {"max_new_tokens", "max_prompt_len", "offload_trainer"},
}


@pytest.mark.parametrize("kind", COMPUTED_FIELDS, ids=lambda kind: kind.__name__)
def test_a_computed_default_has_to_be_filled_in(kind: type) -> None:
    """Sections of the configuration are the ranks' settings; a marker is no value."""
    computed = COMPUTED_FIELDS[kind]
    assert {f.name for f in fields(kind) if f.default == COMPUTED} == computed
    whole = kind(**dict.fromkeys(computed, 1))
    for name in computed:
        values = {other: 1 for other in computed if other != name}
        with pytest.raises(TypeError, match=f"needs a value for '{name}'"):
            kind(**values)
        assert getattr(whole, name) == 1
    with pytest.raises(TypeError, match="needs a value for 'gradient_checkpointing'"):
        job.Settings(optim=Optim(), batch=Batch(), launch=Launch())


def test_every_setting_of_training_is_read_from_the_configuration() -> None:
    """Section `train` as composed, less the fields that do not change the result."""
    sections = compose_config([]).settings
    made = Settings.from_sections(
        **{name: sections[name] for name in ("train", "peft", "zero", "model", "seed")}
    )
    document = asdict(made)
    flat = {**document, **document["optim"], **document["batch"]}
    flat |= {**document["launch"], **document["evaluate"]}
    missing = {f.name for f in fields(Resume)}
    assert {name for name in sections["train"] if name not in flat} == missing
    assert flat["loss"] == sections["train"]["loss"]
    assert all(value == sections["train"].get(name, value) for name, value in flat.items())
    assert json.loads(json.dumps(document["peft"])) == sections["peft"]


def test_batch_arithmetic() -> None:
    assert Batch(4, 64).accumulation(2) == 8
    with pytest.raises(ConfigError, match=r"global_batch_size=10 is not a multiple") as caught:
        Batch(4, 10).accumulation(2)
    assert caught.value.hint.startswith("train.global_batch_size=8")


def test_ranks_wait_for_each_other_at_least_as_long_as_for_rollouts(tmp_path: Path) -> None:
    job = TrainJob(Settings(), tmp_path, "b", tmp_path, tmp_path, tmp_path)
    assert collective_timeout_s(job) == 1800
    online = {"rollout": {"timeout_s": 3800.0}}
    assert collective_timeout_s(replace(job, settings=Settings(online=online))) > 3800


def test_whole_buckets_are_counted_on_gpus() -> None:
    """DeepSpeed allocates all of `zero.bucket_size`, twice if it overlaps."""
    sizes = [
        estimate(QWEN_7B, replace(Settings(peft=Peft("lora")), zero=zero), 1, gpu=gpu).gradients
        for zero, gpu in ((Zero(0), True), (Zero(1), True), (Zero(1, overlap_comm=True), True))
    ]
    assert [after - sizes[0] for after in sizes[1:]] == [10**8, 2 * 10**8]


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (3, True)])
def test_on_gpus_deepspeed_chooses_the_overlap(stage: int, overlaps: bool) -> None:
    """Overlapped communication, and page-locked memory, without which copies block."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = Zero(stage, offload_optimizer="cpu", offload_param="cpu" if stage == 3 else "none")
    settings = Settings(optim=Optim(lr=1e-4), batch=Batch(1, 2), zero=zero)
    made = deepspeed_config(settings, 2, gpu=True)["zero_optimization"]
    assert "overlap_comm" not in made
    assert made["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert ("offload_param" in made) == (stage == 3)
    assert made.get("offload_param", made["offload_optimizer"])["pin_memory"]
    assert DeepSpeedZeroConfig(**made).overlap_comm is overlaps
    told = replace(settings, zero=replace(zero, overlap_comm=False))
    assert deepspeed_config(told, 2, gpu=True)["zero_optimization"]["overlap_comm"] is False
    on_cpus = deepspeed_config(settings, 2)["zero_optimization"]
    assert on_cpus["overlap_comm"] is False
    assert on_cpus["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_sizes_of_a_published_model() -> None:
    """Qwen2.5-7B: 7,615,616,512 parameters, of which 28 x 4,608 are attention biases."""
    sizes = Sizes.of(QWEN_7B)
    assert sizes.linear_weights() + sizes.other_weights() == 7_615_616_512 - 28 * 4_608
    # Rank 64 on all seven maps, the number peft prints for this model.
    assert adapter_weights(sizes, Settings(peft=Peft("lora", rank=64))) == 161_480_704


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_an_unknown_mixture_of_experts_is_not_estimated(key: str) -> None:
    """A plan had better say "unknown" than count one of eight experts."""
    with pytest.raises(KeyError, match="mixture of experts"):
        Sizes.of({**QWEN_7B, key: 8})
    assert Sizes.of({**QWEN_7B, key: 0}) == Sizes.of(QWEN_7B)


def test_estimate_divides_what_the_stage_partitions() -> None:
    once = Settings(batch=Batch(4, 16))
    full = {s: estimate(QWEN_7B, replace(once, zero=Zero(s)), 4) for s in (0, 1, 2, 3)}
    weights = 7_615_616_512 - 28 * 4_608
    bucket, live = 2 * Zero().bucket_size, 2 * 10**9
    assert full[0].weights == 2 * weights
    assert full[0].optimizer == 12 * weights
    assert full[1].optimizer == 3 * weights
    assert (full[1].gradients, full[2].gradients) == (2 * weights + bucket, weights // 2 + bucket)
    assert (full[3].weights, full[3].gathered) == (weights // 2, live)
    assert (full[0].step, full[2].step, full[3].step) == (4 * weights, 3 * weights, 12 * 10**9)
    several = estimate(QWEN_7B, Settings(zero=Zero(2)), 4)  # whose gradients add up in fp32
    assert several.gradients == weights + bucket
    # gathered ahead in flat buckets, and gloo has flat copies of two of them
    assert full[3].communication == live + 2 * bucket
    qlora = estimate(QWEN_7B, Settings(peft=Peft("qlora")), 1, gpu=True)
    assert qlora.weights < 0.4 * full[0].weights
    small = replace(Settings(), optim=Optim(optimizer="adamw_8bit"))
    assert estimate(QWEN_7B, small, 1).optimizer < 0.53 * full[0].optimizer
    assert estimate(QWEN_7B, Settings(dtype="float32"), 1).optimizer == 8 * weights
    kept = Settings(gradient_checkpointing=True)
    assert estimate(QWEN_7B, kept, 1).activations < full[0].activations / 2


def test_on_a_gpu_the_step_reuses_the_activations_memory() -> None:
    found = estimate(QWEN_7B, Settings(zero=Zero(3)), 4, gpu=True)
    states = found.weights + found.gathered + found.gradients + found.optimizer
    assert (found.stays, found.allocator, found.released) == (0, 0, 0)
    assert found.total == states + max(
        found.step, found.activations + found.logits, found.communication
    )
    assert found.states == states + max(found.step, found.communication)


def test_a_cpus_heap_keeps_small_allocations_and_holes() -> None:
    """0.1 B, two samples of 256 tokens: a layer allocates pieces below 32 MiB, the head above."""
    small = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000,
             "tie_word_embeddings": True}  # fmt: skip
    settings = Settings(zero=Zero(2), batch=Batch(2, 4, max_len=256))
    found = estimate(small, settings, 2)
    assert found.stays < found.activations + found.logits
    assert found.allocator == int(HOLES * found.stays)
    # gradients are fp32 and the pass is over when the step takes most
    row = found.activations + found.logits
    assert found.step > row - found.stays + found.gradients
    lasting = found.weights + found.optimizer
    assert found.total == lasting + found.stays + found.allocator + found.step
    alone = estimate(small, replace(settings, zero=Zero(3)), 1)
    assert alone.communication == 0
    assert alone.weights == estimate(small, settings, 1).weights


def test_offloaded_states_are_on_the_host() -> None:
    weights = 7_615_616_512 - 28 * 4_608
    settings = Settings(zero=Zero(3, offload_optimizer="cpu"))
    found = estimate(QWEN_7B, settings, 4, gpu=True)
    assert (found.optimizer, found.step) == (0, 0)
    # master, two moments, the updated weights in 16 bits, the gradient in fp32
    assert found.host == (12 + 2) * weights // 4 + 4 * 10**9  # of a sub-group of 10^9
    both = replace(settings, zero=replace(settings.zero, offload_param="cpu"))
    more = estimate(QWEN_7B, both, 4, gpu=True)
    assert more.host == found.host + 2 * weights // 4
    assert more.weights == found.weights - 2 * weights // 4
    assert estimate(QWEN_7B, settings, 4).host == 0


def test_copies_for_checkpoints_are_on_the_host() -> None:
    """Each of two ranks copies half of what both write; a CPU's host is its own memory."""
    weights = 7_615_616_512 - 28 * 4_608
    settings = Settings(zero=Zero(2))
    on_gpu = estimate(QWEN_7B, settings, 2, gpu=True, async_save=True)
    assert (on_gpu.host, on_gpu.checkpoint) == (16 * weights // 2, 0)
    plain, copied = (estimate(QWEN_7B, settings, 2, async_save=on) for on in (False, True))
    assert copied.checkpoint == copied.total - plain.total == 16 * weights // 2
    assert copied.parts()["checkpoint"] == copied.checkpoint


def test_a_score_head_is_a_vector_and_a_critic_does_not_train_its_output_head() -> None:
    """Neither has logits: transformers' classifier has no output head, a critic a frozen one."""
    weights, table = 7_615_616_512 - 28 * 4_608, 152064 * 3584
    settings = Settings(zero=Zero(2))
    reward = estimate(QWEN_7B, replace(settings, objective="reward"), 4, gpu=True)
    assert (reward.weights, reward.logits) == (2 * (weights - table), 0)
    critic = estimate(QWEN_7B, settings, 4, gpu=True, critic=True)
    assert (critic.weights, critic.logits) == (2 * weights, 0)
    assert critic.optimizer == reward.optimizer == 12 * (weights - table) // 4


def test_pairs_share_a_row_and_responses_follow_prompts() -> None:
    batch = Batch(micro_batch_size=2, max_len=512)
    sft = estimate(QWEN_7B, Settings(batch=batch), 1, gpu=True)
    dpo = estimate(QWEN_7B, Settings(batch=batch, objective="dpo"), 1, gpu=True)
    kto = estimate(QWEN_7B, Settings(batch=batch, objective="kto"), 1, gpu=True)
    assert dpo.activations == 2 * sft.activations == 2 * kto.activations
    online = {"rollout": {"max_prompt_len": 300, "max_new_tokens": 212}}
    grpo = Settings(batch=replace(batch, max_len=9), objective="grpo", online=online)
    assert estimate(QWEN_7B, grpo, 1, gpu=True).activations == sft.activations


def test_ranks_of_a_node_share_the_quantised_file() -> None:
    weights = 7_615_616_512 - 28 * 4_608
    lora = Settings(peft=Peft("lora"), zero=Zero(2))
    qlora = replace(lora, peft=Peft("qlora"))
    assert estimate(QWEN_7B, qlora, 2).mapped == 2 * weights
    for other in (lora, replace(lora, zero=Zero(3)), replace(lora, peft=Peft("none"))):
        assert estimate(QWEN_7B, other, 2).mapped == 0
    assert estimate(QWEN_7B, qlora, 2, gpu=True).mapped == 0
    assert on_node(10, 4, 3) == 3 * (10 - 4 + LIBRARIES) + 4


def test_weights_of_adapters() -> None:
    sizes = Sizes.of(QWEN_7B)
    lora = adapter_weights(sizes, Settings(peft=Peft("lora", rank=8)))
    pissa = adapter_weights(sizes, Settings(peft=Peft("lora", rank=8, init="pissa")))
    assert pissa == 2 * lora
    outputs = sum(out for _, out in sizes.linears().values())
    dora = adapter_weights(sizes, Settings(peft=Peft("lora", rank=8, use_dora=True)))
    assert dora == lora + 28 * outputs
    pattern = Peft("lora", rank=8, rank_pattern={"q_proj": 4}, exclude_modules=("down_proj",))
    fewer = 4 * 2 * 3584 + 8 * (18944 + 3584)
    assert adapter_weights(sizes, Settings(peft=pattern)) == lora - 28 * fewer
    whole = Peft("lora", rank=8, modules_to_save=("embed_tokens",))
    assert adapter_weights(sizes, Settings(peft=whole)) == lora + 152064 * 3584


def test_keys_and_values_of_a_published_model() -> None:
    """Qwen2.5-7B needs 56 KiB per token in 16 bits: 2 x 28 layers x 4 heads x 128 x 2 bytes."""
    assert Sizes.of(QWEN_7B).kv_cache(1) == 57_344


def test_modules_of_the_flow_need_no_torch() -> None:
    code = (
        "import sys, tasks.train, tasks.training.memory.estimate\n"
        "import tasks.training.engine.zero_config\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def deepspeed_s(name: str, file: str) -> Callable[..., tuple[int, ...]]:
    """Return a DeepSpeed function that is plain arithmetic, without importing DeepSpeed."""
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "runtime" / "zero" / file).read_text())
    tree.body = [one for one in tree.body if getattr(one, "name", None) == name]
    names: dict[str, Any] = {}
    exec(compile(tree, file, "exec"), names)
    function: Callable[..., tuple[int, ...]] = names[name]
    return function


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_states_against_deepspeeds_own_estimates(ranks: int) -> None:
    """Compare with DeepSpeed's estimates, which differ in two known ways.

    DeepSpeed counts 18 bytes per weight, and of those of a sub-group 4 in the step under ZeRO-3;
    and ZeRO-3 gathers 10^9 weights ahead, not one layer.
    """
    sizes = Sizes.of(QWEN_7B)
    weights = sizes.weights()
    zero2 = deepspeed_s("estimate_zero2_model_states_mem_needs", "stage_1_and_2.py")
    zero3 = deepspeed_s("estimate_zero3_model_states_mem_needs", "stage3.py")
    batch = Batch(4, 4 * ranks)
    settings = Settings(zero=Zero(2), batch=batch, launch=Launch(nproc=ranks))
    _, device = zero2(weights, num_gpus_per_node=ranks, cpu_offload=False)
    assert device == 2 * weights + 18 * weights // ranks
    ours = estimate(QWEN_7B, settings, ranks, gpu=True)
    assert ours.states == pytest.approx(device, abs=8)
    layer = sizes.vocab * sizes.hidden
    _, device, largest = zero3(weights, layer, num_gpus_per_node=ranks, cpu_offload=False)
    three = estimate(QWEN_7B, replace(settings, zero=Zero(3)), ranks, gpu=True)
    assert largest == 4 * layer
    assert three.step == 4 * min(weights // ranks, 10**9)
    bucket = 2 * Zero().bucket_size
    lasting = three.states - three.step - three.gathered - bucket
    assert lasting == pytest.approx(device - largest - 2 * weights // ranks, abs=8)
    offloaded = replace(settings, zero=Zero(3, offload_optimizer="cpu"))
    host, device, _ = zero3(weights, layer, num_gpus_per_node=ranks, cpu_offload_params=False)
    memory = estimate(QWEN_7B, offloaded, ranks, gpu=True)
    assert host == int(1.5 * 16 * weights)  # of the node, with half as much again for buffers
    assert 14 * weights <= ranks * memory.host <= host
    assert memory.weights == device - 4 * layer


def test_nccls_watchdog_is_explained(tmp_path: Path) -> None:
    """NCCL raises nothing: it prints a line and aborts the rank."""
    line = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"

    def run(*_: Any, **__: Any) -> list[str]:
        raise StageProcessError("train", -6, [line, "terminate called"])

    job = TrainJob(Settings(), tmp_path, "b", tmp_path, tmp_path, tmp_path)
    events = _Events(None, logging.getLogger("test"), 64)
    with pytest.raises(TrainingError, match="waited 1800 s for the other ranks") as caught:
        _launch(job, run, events, None, {})
    assert caught.value.details == (line,)
