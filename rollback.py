"""
Back to what served before the last change, with no download.

    pyinfra inventory/prod.py rollback.py --dry            show what goes back to what
    pyinfra inventory/prod.py rollback.py                  show, ask, do it

What it goes back from is refused from then on: neither deploy.py nor upgrade.py brings it back
until `upgrade.py --data clear=RELEASE`. Within a pool as many instances go at once as
`rollout.most_out` and `rollout.wave` allow.
"""

from vllm_fleet import deploys

deploys.rollback()
