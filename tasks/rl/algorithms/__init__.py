"""Formulas of online RL: advantages, policy and value losses, KL, importance weights.

registry      algorithms by name
batch         what the formulas take and return
"""
