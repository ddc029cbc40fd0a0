"""Hostile files, and the scanner that finds what loading them would run."""
