"""One file per family of findings, each with `check(source) -> Iterator[Finding]`."""
