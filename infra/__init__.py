"""Set-up, servers and deployment of Plumbline; not part of the installed package.

setup.sh    the environment, from the locks
servers/    `make up`, `make deploy`, `make down`, backup and restore of what they record
words          the check of the project's English
prefect.yaml, grafana.json    the deployments; a dashboard
compose.yaml, Dockerfile, nodes/, action/ are for containers, clusters and GitHub.
"""
