"""Checks of PEFT adapters: files, tensors, base, and the proof of a merge."""
