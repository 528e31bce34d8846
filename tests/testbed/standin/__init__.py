"""Source of the stand-in for vLLM that `tests.testbed.standin_wheel` packs; runs on the hosts.

It has vLLM's command, HTTP surface, boot log and process tree, loads the real gate as
middleware, and computes nothing: for many instances, for timing and for versions that are bad in
a chosen way. Whatever shows it says so.
"""
