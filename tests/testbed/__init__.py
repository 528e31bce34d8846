"""Real test hosts on one machine: systemd-nspawn, sshd, network namespaces.

Every host is a Debian or Ubuntu root file system (an overlay over one base) that boots a real
systemd in its own network namespace. :mod:`tests.testbed.bed` is the way in;
``python -m tests.testbed --help`` is the same by hand. Root is needed.
"""
