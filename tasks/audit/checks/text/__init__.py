"""Checks of tokenizers, special tokens, chat templates and embeddings."""
