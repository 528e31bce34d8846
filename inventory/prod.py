"""Example: three GPU hosts behind one gateway. Copy it, put your own hosts, and check it:

    fleet check inventory/prod.py
    pyinfra inventory/prod.py deploy.py --dry

Hosts, groups and how to reach them stand here, as pyinfra wants them; what they are to serve
stands in group_vars/prod.yml. Every list in this file is a group of hosts to pyinfra, so the
name of anything else must start with "_".
"""

# For every host: a user who may use sudo. Keys and jump hosts may also come from ~/.ssh/config.
_REACH = {"ssh_user": "deploy", "_sudo": True}

gpu = [
    # The name is how we call the host; ssh_hostname is where it is reached.
    ("gpu-01", {"ssh_hostname": "10.0.0.11", **_REACH}),
    ("gpu-02", {"ssh_hostname": "10.0.0.12", **_REACH}),
    ("gpu-03", {"ssh_hostname": "10.0.0.13", **_REACH}),
    # With its own port and key:
    # ("gpu-04", {"ssh_hostname": "10.0.0.14", "ssh_port": 2222, "ssh_key": "~/.ssh/id", **_REACH}),
]

gateway = [
    ("gw-01", {"ssh_hostname": "10.0.0.10", **_REACH}),
]

# One host may be in several groups.
monitoring = [
    ("gw-01", {"ssh_hostname": "10.0.0.10", **_REACH}),
]
