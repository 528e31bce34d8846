"""
Everything a host gets, in the order it gets it.

    pyinfra inventory/prod.py deploy.py                    show changes, ask, apply
    pyinfra inventory/prod.py deploy.py --dry              show changes only
    pyinfra inventory/prod.py deploy.py --limit gpu-01 -y  one host, no questions

The plan is made before anything is changed: group_vars checked, every host looked at, every
refusal told at once. Each chapter compares and does only what differs.
"""

from vllm_fleet import deploys

plan = deploys.my_plan()

deploys.prepare(plan)  # Debian packages, then every file of ours in one go
deploys.stage(plan)  # tools, releases and weights: built and verified beside what serves
deploys.meet("Everything is staged on every host")

deploys.open_gateway(plan)  # nginx routes to what will serve and no more to what leaves
deploys.meet("The gateways know the pools")

deploys.serve(plan)  # what does not run starts; what runs with old settings is replaced
deploys.watch(plan)  # Prometheus, node exporter, Grafana
deploys.meet("Everything serves")

deploys.retire(plan)  # what is no longer in the plan: drained, stopped, removed
