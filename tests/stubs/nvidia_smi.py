"""An nvidia-smi for hosts of the bed, none of which has a card: a Python script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tests.testbed.hosts import Host

SCRIPT = """\
#!/usr/bin/python3
import json, sys
cards = json.loads(%r)
for word in sys.argv[1:]:
    if word.startswith("--query-gpu="):
        fields = word.split("=", 1)[1].split(",")
        if not any("noheader" in each for each in sys.argv):
            print(", ".join(fields))
        for card in cards:
            print(", ".join(card.get(field, "[N/A]") for field in fields))
    elif word.startswith("--query-compute-apps=") and "noheader" not in sys.argv[-1]:
        print("gpu_uuid, pid, process_name, used_gpu_memory [MiB]")
if sys.argv[1:3] == ["topo", "-m"]:
    every = range(len(cards))
    print("\\t".join(["", *(f"GPU{n}" for n in every), "CPU Affinity", "NUMA Affinity"]))
    for n in every:
        links = [" X " if n == m else "PHB" for m in every]
        print("\\t".join([f"GPU{n}", *links, "0-15", "0"]))
"""


def card(number: int, name: str, mib: int, capability: str) -> dict[str, str]:
    """What it says of one idle card, by the fields of --query-gpu."""
    return {
        "index": str(number),
        "uuid": f"GPU-{number}",
        "name": name,
        "pci.bus_id": f"00000000:0{number + 1}:00.0",
        "memory.total": f"{mib} MiB",
        "memory.used": "1 MiB",
        "compute_cap": capability,
        "driver_version": "580.95.05",
        "mig.mode.current": "[N/A]",
        "persistence_mode": "Enabled",
    }


def script(cards: Sequence[Mapping[str, str]]) -> str:
    """The program's text, for a host with these cards, side by side without NVLink."""
    return SCRIPT % json.dumps(list(cards))


def put(host: Host, cards: Sequence[Mapping[str, str]]) -> None:
    """Make ``host`` one with these cards, until it boots again."""
    host.sh("cat >/usr/bin/nvidia-smi; chmod 755 /usr/bin/nvidia-smi", stdin=script(cards))
    host.sh("touch /dev/nvidia-uvm")  # else no start: CUDA would see no card
    # A release for cards is asked to have room for CUDA; the stand-in's needs none of it.
    host.sh("mkdir -p /opt/vllm && mount -t tmpfs -o size=64g,mode=755 tmpfs /opt/vllm")
