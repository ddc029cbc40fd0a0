"""Prefect's server: embedded in a command, or that of `make up`.

prefect_server  the embedded server, for as long as a command runs; `prefect_app` guards it
prefect_watch   what a run does when its server is gone, or the run is cancelled in Prefect
services        the servers that `make up` runs: where they are, and their login
"""
