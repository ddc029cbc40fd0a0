"""Checks of a running server: each asks it, and returns one verdict.

distribution  the trained model's log-probabilities, and the likely cause if they are others
adapters    how much of the adapter answers under its name, and under the base's
sampling    the server's own temperature, top-k and top-p
prompt      template and tokens
ending      EOS and context
load        alone and in a crowd, the same prompt again, long prompts, streams
leak        base and adapters by turns
differences, changes   how two token sequences, and two sets of answers, differ
"""
