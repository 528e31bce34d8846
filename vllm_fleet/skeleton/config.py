"""Settings of pyinfra itself; read from the directory that pyinfra is started in."""

from pyinfra import config

config.REQUIRE_PYINFRA_VERSION = "~=3.10.0"
