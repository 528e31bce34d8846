"""What the doctor can find: one entry for each, or the alert's or known failure's that it is.

Findings, alerts (vllm_fleet/alerts) and known failures (vllm_fleet/causes) have one name space:
what leads to a thing by any of these ways leads to one entry of the runbook.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from vllm_fleet.alerts import alerts
from vllm_fleet.causes import load

Level = Literal["critical", "warning", "info"]
LEVELS: tuple[Level, ...] = ("critical", "warning", "info")
Area = Literal[
    "hosts",
    "exam",
    "units",
    "processes",
    "plan",
    "weights",
    "instances",
    "names",
    "gateway",
    "keys",
    "certificates",
    "nccl",
    "monitoring",
    "clock",
    "disk",
    "restarts",
]
# The checklist, in the order in which it is shown.
AREAS: dict[Area, str] = {
    "hosts": "hosts answer",
    "exam": "hosts are fit for what they are to do",
    "plan": "hosts are as the plan says",
    "units": "units run, and start at boot",
    "processes": "ports and cards are held by our units alone",
    "weights": "weights are what was verified, with their chat templates",
    "instances": "instances answer, and a talk of several turns ends",
    "names": "models are called alike in plan, instances and gateways",
    "gateway": "gateways reach the instances and answer for every model",
    "keys": "keys of clients hold",
    "certificates": "certificates hold",
    "nccl": "environment of NCCL and Gloo is what is meant",
    "restarts": "instances were not restarted",
    "monitoring": "Prometheus reads every target, and no alert fires",
    "clock": "clocks agree",
    "disk": "disks have room",
}


@dataclass(frozen=True)
class Entry:
    """One kind of finding. Those above stand nearer to a cause than those below."""

    id: str
    level: Level
    area: Area
    cause: str
    remedy: str


ENTRIES = (
    # --- what breaks answers now, or at the next start
    Entry(
        "host-access",
        "critical",
        "exam",
        "Commands run on this host without root's rights, so nothing can be looked at or changed.",
        "Set `_sudo` (and `_sudo_password`) for it in the inventory.",
    ),
    Entry(
        "host-unsupported",
        "critical",
        "exam",
        "The host's system, init or Python is none that releases of vLLM run on here.",
        "The finding says what is supported: install that, or take the host out of the inventory.",
    ),
    Entry(
        "driver-unfit",
        "critical",
        "exam",
        "The driver of the cards is missing, broken, or too old for the wanted release.",
        "The finding quotes nvidia-smi and says what it means.",
    ),
    Entry(
        "card-unfit",
        "critical",
        "exam",
        "A card that an instance is to use is missing, broken, of another kind, or in use.",
        "The finding says which card and why; `fleet plan INVENTORY` shows the groups there are.",
    ),
    Entry(
        "firewall-off",
        "critical",
        "units",
        "The table that closes the instances' ports is not kept in place: anybody in the network "
        "may ask the engines, past keys and limits.",
        "`systemctl enable --now` the unit in the finding; `nft list table inet vllm_fleet` shows "
        "the table.",
    ),
    Entry(
        "orphan-engine",
        "critical",
        "processes",
        "An engine runs outside any unit: its server was killed and left it behind. It keeps the "
        "card's memory, and the next start on this card fails.",
        "Kill it by its pid; the memory comes back within seconds. Units of ours take their "
        "workers with them, so it came from something started otherwise.",
    ),
    Entry(
        "started-by-hand",
        "critical",
        "processes",
        "A vLLM server was started by hand or by an old script, outside our units: it holds cards "
        "and ports, nothing restarts or watches it, and its port has no gate.",
        "Stop it by its pid, and take its start out of crontab, rc.local or whatever began it. "
        "What it served belongs into `instances`.",
    ),
    Entry(
        "weights-differ",
        "critical",
        "weights",
        "Files of the weights are not the bytes that were verified. vLLM starts with them and "
        "gives wrong answers.",
        "`weights.py verify` marks what is wrong, deploy fetches that alone, a restart loads it. "
        "Then look at the disk: `dmesg`, `smartctl -a`.",
    ),
    Entry(
        "weights-changed",
        "critical",
        "weights",
        "Files of the weights were written or deleted after they were verified.",
        "deploy verifies them again and fetches what is wrong; restart the instance where it may "
        "have loaded them.",
    ),
    Entry(
        "served-name-differs",
        "critical",
        "names",
        "A server or gateway answers to other model names than the plan says: clients get 404.",
        "deploy puts the launch script back; restart the instance where it runs with another "
        "name. Names are set by the key in `models` and by `aliases`, nowhere else.",
    ),
    Entry(
        "port-blocked",
        "critical",
        "gateway",
        "A port listens on its host and cannot be reached from the host that needs it: a firewall "
        "or a route is in between.",
        "Where a rule on the host itself does it, the finding names the rule and deletes it. Else "
        "look at firewalls in between, and at `address` of the host.",
    ),
    Entry(
        "instance-stopped",
        "critical",
        "units",
        "The unit of an instance is not running, and nobody has said that it should not.",
        "Start it, or deploy. If its host is to stay out of service: `maintain.py --data do=hold`.",
    ),
    Entry(
        "answers-fail",
        "critical",
        "instances",
        "An instance is up and does not answer a request of one token.",
        "`journalctl -u vllm@NAME -n 400 | fleet explain -`; silence means that the engine hangs: "
        "restart the unit.",
    ),
    Entry(
        "gateway-answers-fail",
        "critical",
        "gateway",
        "The gateway does not give a client's request for one token an answer.",
        "The status in the finding is explained in docs/operations.md, What clients are told. "
        "`curl -s 127.0.0.1:9145/status` on the gateway shows whom it would ask.",
    ),
    Entry(
        "service-stopped",
        "critical",
        "units",
        "A unit that this host needs is not running.",
        "Start and enable it; `journalctl -u UNIT -n 50` says why it ended.",
    ),
    Entry(
        "not-looked-at",
        "critical",
        "hosts",
        "A host gave its state and then no answer in time, so most of it was not looked at.",
        "A disk or a driver that hangs holds up what touches it: `dmesg | tail -n 50` there.",
    ),
    # --- what is not as it should be
    Entry(
        "exporter-stopped",
        "warning",
        "units",
        "An exporter of metrics is not running: alerts about this host cannot fire.",
        "Start and enable its unit.",
    ),
    Entry(
        "timer-stopped",
        "warning",
        "units",
        "A timer of ours (probe, host watch, certificate) is not running.",
        "Start and enable it; deploy does so too.",
    ),
    Entry(
        "unit-disabled",
        "warning",
        "units",
        "A unit runs and would not start after a reboot.",
        "Enable it.",
    ),
    Entry(
        "key-expired",
        "warning",
        "keys",
        "A key of a client has expired: who still uses it gets 401.",
        "Add a new entry to the file of keys and deploy, or take the old one out.",
    ),
    Entry(
        "key-expires",
        "info",
        "keys",
        "A key of a client expires within two weeks.",
        "Add a second entry under another name, deploy, move the client, take the first out.",
    ),
    Entry(
        "file-edited",
        "warning",
        "plan",
        "A file that deploy wrote was changed or deleted by hand; the next deploy puts it back.",
        "Bring the change into group_vars where it is wanted, then deploy.",
    ),
    Entry(
        "not-deployed",
        "warning",
        "plan",
        "The host is not as the plan says: settings were changed and not deployed.",
        "`fleet plan INVENTORY` shows what a deploy would do; deploy it.",
    ),
    Entry(
        "files-not-read",
        "warning",
        "plan",
        "A daemon runs with older files than those on disk.",
        "deploy reloads or restarts it as it needs.",
    ),
    Entry(
        "release-differs",
        "info",
        "plan",
        "An instance runs another release than group_vars want; deploy.py leaves it.",
        "`upgrade.py` brings it there.",
    ),
    Entry(
        "change-cut-off",
        "warning",
        "plan",
        "A change of an instance was cut off half way, or is under way.",
        "`upgrade.py` goes on there, `rollback.py` undoes it.",
    ),
    Entry(
        "plan-refused",
        "warning",
        "plan",
        "deploy.py would refuse this fleet as it is.",
        "The finding says why; `fleet plan INVENTORY` shows all of it.",
    ),
    Entry(
        "lock-left",
        "warning",
        "plan",
        "A run that changes the fleet has been silent for minutes and keeps the lock.",
        "Where it is gone for certain: `--data unlock=RUN`.",
    ),
    Entry(
        "host-held",
        "info",
        "units",
        "An operator keeps this host out of service.",
        "`maintain.py --data do=return` brings it back.",
    ),
    Entry(
        "instance-starting",
        "warning",
        "instances",
        "An instance is starting or stopping, so it gets no requests.",
        "`journalctl -fu vllm@NAME`: the warm-up prints what it waits for.",
    ),
    Entry(
        "instance-drained",
        "warning",
        "gateway",
        "A gateway keeps requests away from an instance that works: an operator drained it, or a "
        "change was cut off.",
        "Undrain it at that gateway.",
    ),
    Entry(
        "gateway-sees-other",
        "warning",
        "gateway",
        "A gateway takes an instance for not ready that is ready on its own host.",
        "It asks again each second; where it stays so, see `vllm-fleet` in the gateway's "
        "/var/log/nginx/error.log.",
    ),
    Entry(
        "gateway-not-asked",
        "info",
        "gateway",
        "The gateway asks for keys, and none is at hand in plain text: it was not asked for an "
        "answer.",
        "`fleet doctor INVENTORY --key-file FILE` with a key of a client in FILE.",
    ),
    Entry(
        "talk-fails",
        "warning",
        "instances",
        "One question is answered, a talk of three turns is not: often the chat template.",
        "The finding quotes the answer; `fleet explain` knows the usual ones.",
    ),
    Entry(
        "talk-does-not-end",
        "info",
        "instances",
        "No answer of a short talk ended by itself within its tokens. Usual for a model that "
        "thinks at length; else the model's end-of-turn token is not among its `eos_token_id`.",
        "Compare `eos_token_id` in generation_config.json with the template's last token of a "
        "turn.",
    ),
    Entry(
        "debugging-left",
        "warning",
        "nccl",
        "Variables of a past hunt for a fault are still set: they slow the engine down, fill the "
        "journal, or turn fast paths off.",
        "Take them out where the finding says, then restart the instance.",
    ),
    Entry(
        "keep-alive-short",
        "warning",
        "gateway",
        "The engine closes idle connections before the gateways do: a request that is sent at that "
        "moment is lost, and the client gets a 502 now and then.",
        "Take VLLM_HTTP_TIMEOUT_KEEP_ALIVE out where the finding says; what deploy sets fits.",
    ),
    Entry(
        "target-down",
        "warning",
        "monitoring",
        "Prometheus cannot read a target, for the reason in the finding.",
        "`systemctl status` of its unit on its host, then the way there.",
    ),
    Entry(
        "alert-firing",
        "warning",
        "monitoring",
        "An alert of your own rules fires.",
        "See the rule's own annotations.",
    ),
    Entry(
        "card-links",
        "warning",
        "exam",
        "The cards of an instance reach each other by a slow way, or not directly.",
        "The finding names a better group, or the option that works around it.",
    ),
    Entry(
        "restarted",
        "warning",
        "restarts",
        "systemd restarted an instance, and its log names no known cause.",
        "Read the journal around the time in the finding; with the cause mended, "
        "`systemctl reset-failed` clears the count.",
    ),
    Entry(
        "disk-short",
        "warning",
        "disk",
        "A file system is nearly full: logs, caches or the next release will not fit.",
        "`du -xh --max-depth=2 MOUNT | sort -h | tail`; `keep_releases` and `keep_revisions` have "
        "deploy delete what is old.",
    ),
    Entry(
        "little-room",
        "info",
        "exam",
        "The host has little memory or disk for weights and releases.",
        "The finding says how much there is.",
    ),
    Entry(
        "hold-too-short",
        "info",
        "gateway",
        "The only instance of a pool takes longer to start than the gateway holds requests: each "
        "restart refuses some.",
        "Raise `gateway.hold_seconds` above it, or add an instance.",
    ),
)

# Findings whose entry is that of an alert or of a known failure.
SHARED: dict[str, tuple[Level, Area]] = {
    "host-down": ("critical", "hosts"),
    "gateway-down": ("critical", "units"),
    "instance-failed": ("critical", "units"),
    "port-in-use": ("critical", "processes"),
    "card-memory-taken": ("critical", "processes"),
    "no-chat-template": ("critical", "weights"),
    "requests-waiting": ("warning", "instances"),
    "nccl-no-interface": ("warning", "nccl"),
    "gloo-interface": ("warning", "nccl"),
    "nccl-memlock": ("warning", "exam"),
    "unit-changed-on-disk": ("warning", "units"),
    "mixed-versions": ("info", "plan"),
    "glibc-too-old": ("critical", "exam"),
    "no-kernel-image": ("critical", "exam"),
    "persistenced": ("warning", "exam"),
    "fabric-manager": ("critical", "exam"),
    "xid-error": ("warning", "exam"),
    "infiniband-down": ("warning", "exam"),
    "iommu-faults": ("warning", "exam"),
    "group-memory-uneven": ("warning", "exam"),
    "instance-not-ready": ("critical", "instances"),
    "certificate-expires": ("critical", "certificates"),
    "certificate-expires-soon": ("warning", "certificates"),
    "disk-full": ("critical", "disk"),
    "clock-off": ("warning", "clock"),
    "clock-unsynchronised": ("info", "clock"),
}


@cache
def known() -> dict[str, Entry]:
    """Every entry that a finding may lead to, by id."""
    found: dict[str, Entry] = {}
    for cause in load():
        level, area = SHARED.get(cause.id, ("warning", "restarts"))
        found[cause.id] = Entry(cause.id, level, area, cause.cause, cause.remedy)
    for alert in alerts():
        default: Level = "info" if alert.severity == "none" else alert.severity
        level, area = SHARED.get(alert.anchor, (default, "monitoring"))
        found[alert.anchor] = Entry(alert.anchor, level, area, alert.why, alert.remedy)
    found.update({entry.id: entry for entry in ENTRIES})
    return found


@cache
def order() -> dict[str, int]:
    """Place of each id among findings of one level: causes first, what follows from them last."""
    ids = [
        *(e.id for e in ENTRIES[:2]),
        *SHARED,
        *(e.id for e in ENTRIES[2:]),
        *(c.id for c in load()),
    ]
    places: dict[str, int] = {}
    for one in ids:
        places.setdefault(one, len(places))
    return places
