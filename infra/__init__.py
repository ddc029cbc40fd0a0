"""Set-up, services and deployment of Plumbline; not part of the installed package.

services  `make up`, `make deploy` and `make down`: servers and a worker on this machine
daemon    background processes that outlive their command
words     the check of the project's English in `make check`
prefect.yaml, work_pool.json    deployments, and the work pool without job variables
setup.sh, compose.yaml, Dockerfile and nodes/ are for machines, containers and clusters.
"""
