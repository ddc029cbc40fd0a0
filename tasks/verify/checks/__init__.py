"""Checks of a running server: each takes `Asked`, and returns one verdict.

weights     distribution, adapter, base: the weights, and the likely cause if they are others
prompt      template, tokens, EOS and context
sampling    the server's own temperature, top-k and top-p
load        alone and in a crowd, again, streamed, and beside other adapters
"""
