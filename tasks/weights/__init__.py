"""Checkpoints on disk: read, plan, check and write tensors without loading a whole model.

files/, deepspeed/, pickled/, quantized/  sources of tensors; `files/opening` opens any of them
adapters/, families/                      PEFT adapters, model layouts
heads.py, head_plans.py                   value and reward heads: find, split, merge, convert
tokens/                                   tokenizer, vocabulary, chat template
plan/                                     `plan/validate` checks a plan from headers alone
execute/, native/                         `execute/execute` runs a plan with bounded memory
proof/                                    compares a merged model with its base and adapter

Imports no trainer, no Prefect and no MLflow; torch only where numbers are computed.
"""
