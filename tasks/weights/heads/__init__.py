"""Value heads and reward heads of TRL, LLaMA-Factory, OpenRLHF, PEFT and transformers.

detect      `detect`: the head of a folder (`folder`), who wrote it, and its problems
separate    `separate`: plan the model to serve: a policy without its value head, or a reward model
merging     `merged_reward`: plan the reward model of an adapter and its base
split       plan a policy and its value head as two outputs; write the value head
reward      plan a reward model as `*ForSequenceClassification` with one label

TRL stores `v_head.summary.*` in the model, LLaMA-Factory in `value_head.safetensors|bin` beside it;
OpenRLHF stores `score` or `value_head` with mean and std, PEFT uses `modules_to_save`.
"""
