"""The user's data, read row by row into the `dataset` artifact.

    readers.py       files and `datasets` ids -> rows with their place (file and line)
    conversations.py a row -> a checked conversation, or what is wrong with it
    findings.py      what was wrong where: collected, shown, raised
    build.py         rows -> train.jsonl, heldout.jsonl and the counts in dataset.json

Every row that is read is either kept unchanged or counted and reported; nothing disappears.
"""
