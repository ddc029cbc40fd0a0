"""Checkpoints on disk: read, plan, write and prove tensors without loading a model.

    base = open_model(folder)                  # any full model; see `quantized/source.py`
    model = model_facts(folder)                # Model: where each tensor lives in memory
    total = changes([(adapter, 1.0)], model)   # Changes: terms by live name
    plan = plan_merge(base.tensors, model, total, operands)     # an Op for each output tensor
    validate(plan, sources)                    # every input byte once, or dropped for a reason
    done = execute(plan, sources, out)         # streamed; a hash and statistics per tensor
    recompute(plan, sources, merged)           # sampled rows in fp64, by other code

files/, pickled/, quantized/              sources of tensors
zero.py, distributed.py, shards.py        checkpoints of DeepSpeed, torch.distributed, our ranks
lora.py, lora_config.py, pairing.py       PEFT adapters: changes, settings, pairing with a model
model.py, model_class.py, mapping.py      a model in memory, and its tensors on disk
plan.py, merge.py, gather.py, validate.py  plans of output tensors, checked from headers alone
heads.py, head_plans.py                   value and reward heads: find, split, merge, convert
tokens/                                   tokenizer, vocabulary, chat template
execute/, native/                         run a plan with bounded memory
expected.py, recompute.py, proof.py       merged values by other code: ours, and any tool's

Imports no trainer, no Prefect and no MLflow; torch only where numbers are computed.
"""
