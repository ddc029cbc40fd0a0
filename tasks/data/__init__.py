"""Read the user's data row by row into the `dataset` artifact. Every row is kept or reported.

readers    rows of files and `datasets` ids; several sources in order, or mixed by probability
messages   columns of a row; checked messages, tools, conversations
kinds      kinds of rows (conversations, pairs, prompts, ...) and the objectives that use them
build      `build_dataset`: write train.jsonl and heldout.jsonl, refuse control tokens, count rows
"""
