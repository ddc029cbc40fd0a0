"""The mechanism around a stage: key -> reuse or run -> contract -> manifest -> rename -> log.

stage         the mechanism; `report` is what a stage function returns to it
artifact      directories that one stage publishes and the next one reads
tracking      MLflow, and the only importer of it
"""
