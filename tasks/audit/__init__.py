"""Audit: what is wrong with a checkpoint, whoever made it, from its files alone.

run           `audit(folder)` -> a report; `examine` runs the checks
source        the opened folder, as every check gets it; `folder` and `weights` read it
recognise     what a folder is, in one line
checks/       one file per family: `check(source) -> Iterator[Finding]`
catalogue/    every finding: what it means, which tool fails on it, who reported it, what to do
repair/       repairs that lose nothing, as a new artifact
"""
