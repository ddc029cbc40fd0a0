"""The user's data, read row by row into the `dataset` artifact.

    readers.py                  files and `datasets` ids -> rows with their place (file and line)
    sources.py                  several of them, one after the other or mixed by probability
    columns.py                  which columns hold what
    conversations.py pairs.py   a row -> what is learnt from it, checked, or what is wrong with it
    texts.py                    a row -> a raw text, as in pre-training
    messages.py                 what conversations and pairs are made of
    kinds.py                    which objective learns from which kind of rows
    findings.py                 what was wrong where: collected, shown, raised
    reading.py build.py         rows -> train.jsonl, heldout.jsonl and the counts in dataset.json

Every row that is read is either kept unchanged or counted and reported; nothing disappears.
"""
