"""Checkpoints on disk: read, plan, check and write tensors without loading a whole model.

files/, deepspeed/, pickled/, quantized/   sources of tensors; `quantized.source.open_model` opens
                                           any full model
distributed.py, shards.py                  checkpoints of torch.distributed; partitions of our ranks
lora.py, lora_config.py                    PEFT adapters
model.py, model_class.py, mapping.py       a model in memory, and its tensors on disk
plan.py, merge.py, gather.py, validate.py  plans of output tensors, checked from headers alone
heads.py, head_plans.py                    value and reward heads: find, split, merge, convert
tokens/                                    tokenizer, vocabulary, chat template
execute/, native/                          `execute/execute` runs a plan with bounded memory
proof/                                     compares a merged model with its base and adapter

Imports no trainer, no Prefect and no MLflow; torch only where numbers are computed.
"""
