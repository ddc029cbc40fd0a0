"""Checkpoints on disk: read, plan, write and prove tensors without loading a model.

    base = open_model(folder)                  # Tensors: {key: Tensor}, from headers
    model = model_facts(folder)                # Model: where each tensor lives in memory
    total = changes(adapter, model)            # Changes: terms by live name
    plan = plan_merge(base, model, total)    # an Op for each output tensor
    done = write(plan, sources, out)           # validated, streamed; a hash and statistics each
    recompute(plan, sources, merged)           # sampled rows in fp64, by other code

files/, pickled/, quantized/              readers: all return `Tensors`
zero.py, distributed.py, shards.py        checkpoints of DeepSpeed, torch.distributed, our ranks
lora.py, lora_config.py                   PEFT adapters: settings, pairs, changes of a model
model.py, model_class.py, mapping.py      a model in memory, and its tensors on disk
heads.py                                  value and reward heads: find, leave out, convert
plan.py, merge.py, gather.py              plans of output tensors, checked from headers alone
write.py, compute.py, native/             run a plan with bounded memory
expected.py, proof.py                     merged values by other code: of ours, and any tool's
tokens/                                   tokenizer, vocabulary, chat template

Imports no trainer, no Prefect and no MLflow; torch only where numbers are computed.
"""
