"""Checks of tokenizers, special tokens, chat templates and embeddings.

vocabulary, special_tokens, templates     entry points: `check(source)`
embeddings                                finds the embeddings of a model
tokens                                    reads ids from tokenizer.json
template_text                             parses a chat template
"""
