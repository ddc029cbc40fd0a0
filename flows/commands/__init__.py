"""Run one command of `flows/` each: from its composed configuration to its exit status.

rlhf, deliver     the flows that make models
audit             examines and repairs a folder, without Prefect and torch
verify            asks a running server (verify_watch: again and again), without both, too
bisect            finds the first module in which two models differ
open              starts the servers of a folder of runs, and prints their pages
in_prefect        audit and verify as Prefect flows (`prefect=true`)
prune, status     remove old artifacts; list what runs and ran
"""
