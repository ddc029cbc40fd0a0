"""Run what `flows/deliver.py` asks for: check, merge, convert a checkpoint that was made elsewhere.

run_delivery  plans and runs a delivery, with Prefect or without
prepare       reads SOURCE and base, and plans; writes nothing
chain         a planned delivery; `stages` runs its stages
"""
