"""pyinfra's own settings for every run in this directory."""

REQUIRE_PYINFRA_VERSION = "~=3.10.0"
# One connection a host; more hosts than this wait for their turn.
PARALLEL = 32
