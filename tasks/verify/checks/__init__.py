"""Checks of a running server: each asks it, and returns one verdict.

prompt      template and tokens
ending      EOS and context
load        alone and in a crowd, the same prompt again, long prompts, streams
leak        base and adapters by turns
differences, changes   how two token sequences, and two sets of answers, differ
"""
