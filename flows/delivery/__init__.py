"""Run what `flows/deliver.py` asks for: check, merge, convert a checkpoint that was made elsewhere.

delivery = prepare_delivery(composed)      planned.py: read SOURCE and base, plan; write nothing
to_served(delivery, mechanism, scorer)     run_delivery.py: audit, then the hand-off
main()                                     run_delivery.py: the command, in Prefect or without
"""
