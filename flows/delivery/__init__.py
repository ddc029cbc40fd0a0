"""The chain of `flows/deliver.py`, for a checkpoint that was trained elsewhere.

run_delivery  with Prefect around the stages, or without
prepare       from a configuration to a delivery that can be run
chain         what SOURCE is and which stages apply; `stages` declares them
"""
