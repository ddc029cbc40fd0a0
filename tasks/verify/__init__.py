"""verify: ask a running server, and say whether it is the model that was trained.

check         one verdict: what was measured, its limits, likely causes
"""
