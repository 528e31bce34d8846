"""Known failures: which line in a log tells of which cause, and what mends it.

The table is causes/table.yml; deploy, doctor, `fleet explain` and the runbook read it from here.
"""

from vllm_fleet.causes.match import Match, last_error, match
from vllm_fleet.causes.table import Cause, Rank, TableError, load

__all__ = ["Cause", "Match", "Rank", "TableError", "last_error", "load", "match"]
