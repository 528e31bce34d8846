"""Everything a host gets, in the order it gets it. Checks all settings before it touches a host.

pyinfra inventory/prod.py deploy.py --dry    # show what would change
pyinfra inventory/prod.py deploy.py          # show, ask, change
"""

from vllm_fleet.deploys import deploy

deploy()
