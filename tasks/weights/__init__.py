"""Checkpoints on disk: read, plan, write and prove tensors without loading a model.

    base = open_model(folder)                  # Tensors: {key: Tensor}, from headers
    model = model_facts(folder)                # Model: where each tensor lives in memory
    total = changes(adapter, model)            # Changes: terms by live name
    plan = plan_merge(base, model, total)    # an Op for each output tensor
    done = write(plan, sources, out)           # validated, streamed; a hash and statistics each
    recompute(plan, sources, merged)           # sampled rows in fp64, by other code

files/, pickled/, quantized/              readers: all return `Tensors`
zero.py, distributed.py, shards.py        checkpoints of DeepSpeed, torch.distributed, our ranks
lora.py, lora_config.py, pairing.py       PEFT adapters: changes, settings, pairing with a model
model.py, model_class.py, mapping.py      a model in memory, and its tensors on disk
heads.py                                  value and reward heads: find, split, convert
plan.py, merge.py, gather.py              plans of output tensors, checked from headers alone
write.py, compute.py, native/, written.py  run a plan with bounded memory; what was counted
expected.py, proof.py                     merged values by other code: of ours, and any tool's
perform.py                                work that needs torch, here or in a warm child process
tokens/                                   tokenizer, vocabulary, chat template

Imports no trainer, no Prefect and no MLflow; torch only where numbers are computed.
"""
