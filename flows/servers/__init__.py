"""Prefect's server: embedded in a command, or that of `make up`.

prefect_server  the embedded server, for as long as a command runs
services        the servers that `make up` runs: their JSON API, pages and login
"""
