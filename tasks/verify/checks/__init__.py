"""Checks of a running server: each takes `Asked`, and returns one verdict (`run.CHECKS`)."""
