"""Checkpoints on disk: which files, which tensors, which tokenizer; headers only.

reader        a folder of safetensors files as a source of tensors
folder        which files make a Hugging Face model
names         keys of one tensor in a live model, a PEFT file and a base
"""
