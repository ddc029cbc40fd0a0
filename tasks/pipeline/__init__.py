"""Run a stage: key -> reuse or run -> contract -> manifest -> rename -> log.

stage         the mechanism; `report` has what a stage function returns to it
artifact      directories that one stage publishes and the next one reads
retention     what a folder of runs still needs; `removal` removes the rest
locks         who uses a folder of runs, an artifact, a device
"""
