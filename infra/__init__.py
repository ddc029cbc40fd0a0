"""Set-up, servers and deployment of Plumbline; not part of the installed package.

setup.sh    the environment, from the locks
services.py     `make up`, `make deploy`, `make down`
prefect.yaml    the deployments
action/     the gate for a workflow of GitHub
examples/   containers and clusters: starting points, not tested with every change
docs/       the documentation as a site
"""
