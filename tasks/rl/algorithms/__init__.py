"""Formulas of online RL: advantages, policy and value losses, KL, importance weights.

registry      algorithms by name, each a choice of the formulas in the other files
batch         what the formulas take and return
"""
