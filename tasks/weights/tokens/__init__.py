"""The tokenizer of a model folder: its ids, its chat template, and its fit to the embedding.

tokenizer        `read_tokenizer`: ids and chat template of a folder; `vocabulary_findings`: where
                 its size and the embedding's disagree
add_tokens       a tokenizer and an embedding with more tokens
render_template  a chat template, rendered in a child process with limits
"""
