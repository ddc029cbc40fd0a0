"""Errors, contracts, events and hardware facts, which every other package uses.

errors     every error that Plumbline raises on purpose
contract   expected tensors, and checks with their verdicts
terminal   remove escape sequences from text of a checkpoint
disk       flush files and folders
files      open and copy files that somebody else made; the rule for links
events     lines that a child process sends to its parent
machine    GPUs, driver and memory of this machine
"""
