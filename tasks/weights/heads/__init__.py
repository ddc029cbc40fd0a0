"""Heads that turn a language model into one number: value heads and reward heads.

folder      what a folder of any of the dialects holds, headers only
detect      where its head is, who wrote it, what is wrong with it
absence     why a folder that should have a head has none
split       a value head off a policy: two plans, two artifacts, never one folder
reward      a reward model -> `*ForSequenceClassification` with one label
merging     a reward adapter and its base -> the same
separate    which of these a folder needs: one plan, its inputs, its config.json
writing     a value head in a folder of its own

The dialects: TRL (`v_head.summary.*` in the model), LLaMA-Factory (`value_head.safetensors|bin`
beside it), OpenRLHF (`score` or `value_head`, mean and std), PEFT (`modules_to_save`) and
transformers itself.
"""
