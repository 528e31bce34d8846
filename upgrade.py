"""
Another version of vLLM, or any other change, into a fleet that serves.

    pyinfra inventory/prod.py upgrade.py --dry             show who changes when
    pyinfra inventory/prod.py upgrade.py                   show, ask, do it
    pyinfra inventory/prod.py upgrade.py --data unlock=RUN     after a run that was killed
    pyinfra inventory/prod.py upgrade.py --data clear=RELEASE  try a refused release again

The wanted version stands in group_vars. Everything is staged first, beside what serves. Then
canaries, then waves: out of the pool, stopped, started, measured against the old version, back
in. What got worse goes back to what served before, and nothing further is begun.
"""

from vllm_fleet import deploys

plan = deploys.my_plan()

deploys.prepare(plan)  # Debian packages and files of ours; those of instances wait
deploys.stage(plan)  # tools, releases and weights: built and verified beside what serves
deploys.meet("Everything is staged on every host")

deploys.open_gateway(plan)
deploys.meet("The gateways know the pools")

deploys.upgrade(plan)  # one wave after the other, each through every gate
