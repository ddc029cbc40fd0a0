"""Set-up, servers and deployment of Plumbline; not part of the installed package.

setup.sh    the environment, from the locks
servers/    `make up`, `make deploy`, `make down`, backup and restore of what they record
prefect.yaml    the deployments
compose.yaml, Dockerfile, nodes/, action/ are for containers, clusters and GitHub.
"""
