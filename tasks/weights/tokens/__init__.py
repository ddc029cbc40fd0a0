"""The tokenizer of a model folder: its ids, its chat template, and its fit to the embedding.

tokenizer        `read_tokenizer`: ids and chat template of a tokenizer folder
vocabulary       `vocabulary_of`: sizes of tokenizer, embedding and config.json, and what disagrees
add_tokens       a tokenizer and an embedding with more tokens
render_template  a chat template, rendered in a child process with limits
"""
