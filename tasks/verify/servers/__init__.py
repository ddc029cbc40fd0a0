"""Running servers, asked over HTTP: one interface, and one module per dialect.

server     the interface: models, scores, tokens, prompts, generated tokens
"""
