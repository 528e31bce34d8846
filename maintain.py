"""
Hosts out of service without losing a request, one after another, and back.

    pyinfra inventory/prod.py maintain.py --limit gpu-01 --data do=reboot    drain, reboot, return
    pyinfra inventory/prod.py maintain.py --limit gpu-01 --data do=hold      drain, stop, leave so
    pyinfra inventory/prod.py maintain.py --limit gpu-01 --data do=return    start, try, let in
    pyinfra inventory/prod.py maintain.py --data do=reboot                   all GPU hosts in turn

It refuses where a pool cannot do without the host (`rollout.most_out`). What comes back answers
the probe as it did before, or stays out of its pool. A held host is left alone by deploy.py and
upgrade.py; `--data why="memory of card 3"` is told to whoever meets it.
"""

from vllm_fleet import deploys

deploys.maintain()
