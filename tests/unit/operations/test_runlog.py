"""What is printed of many hosts."""

from __future__ import annotations

import logging

import pytest
from pyinfra import logger

from vllm_fleet.operations.runlog import FEW, FewLines


def passed(lines: list[str]) -> list[str]:
    """What comes out of a handler with the filter, counts included."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Handler()
    handler.addFilter(FewLines())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for line in lines:
            logger.info(line)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return seen


@pytest.mark.parametrize("colour", ["", "\x1b[32m"])
def test_lines_that_say_the_same_of_many_hosts_are_counted(colour: str) -> None:
    hosts = [f"[gpu-{n}] {colour}Success" for n in range(500)]
    seen = passed(["--> Starting operation: Files", *hosts, "--> Starting operation: Next"])
    assert len(seen) == FEW + 3
    assert seen[-2] == f"... and {500 - FEW} more hosts: Success"


def test_few_hosts_and_everything_else_are_printed_in_full() -> None:
    lines = ["--> Starting operation: Files", *(f"[gpu-{n}] No changes" for n in range(FEW))]
    lines += [f"[gpu-{n}] Error: executed 0 commands" for n in range(100)]
    lines += [f"[gpu-{n}] weights: 17 of 40 GiB" for n in range(100)]
    lines.append("--> Results:")
    assert passed(lines) == lines


def test_counts_begin_anew_with_each_step() -> None:
    step = ["--> Starting operation: Files", *(f"[gpu-{n}] Skipped" for n in range(FEW))]
    assert passed(step * 3) == step * 3
