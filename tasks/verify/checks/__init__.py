"""Checks of a running server: each asks it, and returns one verdict.

prompt      template and tokens
ending      EOS and context
differences where two token sequences part, for both
"""
