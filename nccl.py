"""
How the hosts of models that span hosts reach each other: found, tested, kept or put back.

    pyinfra inventory/prod.py nccl.py --dry              show old → new of every host
    pyinfra inventory/prod.py nccl.py                    show, ask, test, keep or put back
    pyinfra inventory/prod.py nccl.py --data test=yes    test also where nothing is new

Hosts with `nccl` in group_vars take part. What is new is written beside what is there, on all of
them; then they try it together: links and MTU, ports, point to point, an all-reduce by the
release's own torch. Only what was right and fast enough on all of them is kept, and what was
started with the old environment is rolled.
"""

from vllm_fleet import deploys

plan = deploys.my_plan()

deploys.prepare(plan)  # Debian packages and files of ours, the firewall between the hosts
deploys.stage(plan)  # releases: the torch of the wanted one is what is tried
deploys.meet("Everything is staged on every host")

deploys.network(plan)  # all hosts together; not kept by any of them unless by all
