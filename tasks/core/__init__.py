"""Errors, contracts, events and hardware facts, which every other package uses.

errors     every error that Plumbline raises on purpose; a finding about a setting
contract   expected tensors, and checks with their verdicts
terminal   remove escape sequences from text of a checkpoint
files      open, copy, flush; the rule for links; modes of our own; a full disk
events     lines that a child process sends to its parent
machine    GPUs, driver and memory of this machine
"""
