"""Changing what serves: waves, gates, the way back, lock and record. Free of pyinfra."""
