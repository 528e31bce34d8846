"""pyinfra's own settings for every run in this directory."""

from vllm_fleet.operations.runlog import few_lines

REQUIRE_PYINFRA_VERSION = "~=3.10.0"
# One connection a host; more hosts than this wait for their turn.
PARALLEL = 64
# Lines that say the same of many hosts are counted.
few_lines()
