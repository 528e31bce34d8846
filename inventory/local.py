"""This machine as a whole service: its cards, the gateway and monitoring. Run as root, or with
sudo: ``pyinfra inventory/local.py deploy.py --sudo``."""

gpu = ["@local"]
gateway = ["@local"]
monitoring = ["@local"]
