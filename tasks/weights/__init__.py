"""Checkpoints on disk: read, plan, check and write tensors without loading a whole model.

files/, deepspeed/, pickled/, quantized/  sources of tensors; `files/opening` opens any of them
adapters/, families/, heads/              PEFT adapters, model layouts, value and reward heads
tokens/                                   tokenizer, vocabulary, chat template
plan/                                     `plan/validate` checks a plan from headers alone
execute/, native/                         `execute/execute` runs a plan with bounded memory
proof/                                    compares a merged model with its base and adapter

Imports no trainer, no Prefect and no MLflow; torch only where numbers are computed.
"""
