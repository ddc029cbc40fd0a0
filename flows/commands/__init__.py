"""Run one command of `flows/` each: from its composed configuration to its exit status.

rlhf, deliver     the flows that make models
audit             examines and repairs a folder, without Prefect and torch
verify            asks a running server (verify_watch: again and again), without both, too
prune, status     remove old artifacts; list what runs and ran
"""
