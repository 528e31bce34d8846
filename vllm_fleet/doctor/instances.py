"""Findings about instances: answers, names, weights, environment, restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm_fleet import engine, paths, weights
from vllm_fleet.causes import Rank, last_error, match
from vllm_fleet.doctor.case import Case, Finding, Json
from vllm_fleet.doctor.gateways import blocked
from vllm_fleet.doctor.questions import served_names
from vllm_fleet.gateway import IDLE_SECONDS
from vllm_fleet.spec.model import HostSpec, Instance
from vllm_fleet.state import HostState

# Left over from a hunt for a fault: what each does while it stays.
LEFT_OVER = {
    "NCCL_DEBUG": "NCCL logs what it does",
    "NCCL_DEBUG_SUBSYS": "NCCL logs what it does",
    "NCCL_P2P_DISABLE": "cards copy through host memory",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_SHM_DISABLE": "cards of one host talk over the network",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "VLLM_TRACE_FUNCTION": "every call of a function is logged",
    "VLLM_LOGGING_LEVEL": "every request is logged at length",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
    "TORCH_CPP_LOG_LEVEL": "torch logs what it does",
}
# Values with which they do nothing of the kind.
HARMLESS = {
    "NCCL_DEBUG": ("", "WARN", "VERSION"),
    "VLLM_LOGGING_LEVEL": ("", "INFO", "WARNING", "ERROR"),
    "TORCH_DISTRIBUTED_DEBUG": ("", "OFF"),
    "TORCH_CPP_LOG_LEVEL": ("", "ERROR", "WARNING"),
}
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
SLOW = re.compile(r"no answer within|was not over after")
ENDED = re.compile(r"Main process exited|Failed with result|Scheduled restart job")


def findings(case: Case) -> Iterator[Finding]:
    """Everything about the instances of all hosts."""
    names = served_names(case.fleet)
    for spec, state in case.looked_at:
        answer = case.answer(spec.name)
        yield from _weights(case, spec, state, answer.get("stamps") or {})
        for one in spec.instances:
            seen = (answer.get("instances") or {}).get(one.name)
            if seen:
                yield from _names(case, spec, state, one, seen, names[one.model])
                yield from _answers(case, spec, one, seen)
                yield from _environment(case, spec, one, seen, answer.get("interfaces"))
                yield from _hcas(case, spec, state, one, seen)
                yield from _restarts(case, spec, one, seen)


# --- names and answers


def _names(
    case: Case, spec: HostSpec, state: HostState, one: Instance, seen: Json, wanted: set[str]
) -> Iterator[Finding]:
    running, written = seen.get("names"), seen.get("script_names") or []
    lacks = bool(running) and not wanted <= set(running or ())
    own = {one.model, *spec.settings.models[one.model].aliases}  # adapters are another option
    if lacks or (written and not own <= set(written)):
        served = running if lacks else written
        active = state.units.get(f"vllm@{one.name}.service", {}).get("ActiveState") == "active"
        restart = (case.ssh(spec.name, f"systemctl restart vllm@{one.name}"),)
        yield Finding(
            "served-name-differs",
            spec.name,
            f"it is to answer to {', '.join(sorted(wanted))}",
            ("its /v1/models lists " if lacks else f"{paths.ETC}/{one.name}.sh says ")
            + (", ".join(served or ()) or "nothing"),
            (case.deploy(spec.name), *(restart if active else ())),
            instance=one.name,
        )


def _answers(case: Case, spec: HostSpec, one: Instance, seen: Json) -> Iterator[Finding]:
    answer: Json = seen.get("answer") or {}
    turns: Json = seen.get("turns") or {}
    log = case.ssh(spec.name, f"journalctl -u vllm@{one.name} -n 400 --no-pager")
    if seen.get("why") or (answer and not answer["ok"]):
        why = seen.get("why") or answer["why"]
        rules = case.answer(spec.name).get("blocking") or ()
        if any(rule["port"] == one.port for rule in rules) and "time" in why:
            yield blocked(case, spec.name, one.port, "its own host", f"it: {why}", one.name)
            return
        if answer.get("waiting") and "within" in why:
            # Restarting a busy engine would lose what it works on.
            yield Finding(
                "requests-waiting",
                spec.name,
                f"it is busy: a request of one token gets no answer, {answer['waiting']} wait",
                why,
                (case.ssh(spec.name, f"curl -s 127.0.0.1:{one.port}/metrics | grep num_requests"),),
                instance=one.name,
            )
            return
        known = match(why)
        yield Finding(
            "answers-fail",
            spec.name,
            "a request of one token gets no answer" + (f": {known[0].cause}" if known else ""),
            why,
            (f"{log} | fleet explain -", case.ssh(spec.name, f"systemctl restart vllm@{one.name}")),
            instance=one.name,
        )
    elif turns and not turns["ok"] and SLOW.search(turns["why"]):
        return  # slow, and that is no fault of the talk
    elif turns and not turns["ok"]:
        known = match(turns["why"])
        yield Finding(
            "talk-fails",
            spec.name,
            "a talk of three turns fails" + (f": {known[0].cause}" if known else ""),
            turns["why"],
            (f"{log} | fleet explain -",),
            instance=one.name,
        )
    elif turns and turns.get("answers") and not turns.get("ended") and not turns.get("reasoning"):
        yield Finding(
            "talk-does-not-end",
            spec.name,
            f"none of {turns['answers']} short answers ended by itself",
            "finish_reason was never `stop`",
            instance=one.name,
        )


# --- weights


def _weights(case: Case, spec: HostSpec, state: HostState, stamps: Json) -> Iterator[Finding]:
    told: set[str] = set()
    for one in spec.instances if "gpu" in spec.groups else ():
        model = spec.settings.models[one.model]
        wanted = weights.wanted(one.model, model)
        users = [i.name for i in spec.instances if i.model == one.model]
        found = stamps.get(wanted.stamp)
        seen = (case.answer(spec.name).get("instances") or {}).get(one.name) or {}
        if one.model in told or found is None or not found["there"]:
            continue  # never deployed: told by the plan
        told.add(one.model)
        restart = case.ssh(spec.name, f"systemctl restart {' '.join(f'vllm@{u}' for u in users)}")
        deploy = case.deploy(spec.name)
        if model.source == "path":
            mend: tuple[str, ...] = (deploy,)
        else:
            tool = f"{paths.TOOLS}/current/bin/python {paths.LIB}/weights.py"
            mend = (case.ssh(spec.name, f"{tool} verify {one.model}"), deploy)
        if wanted.needs_chat_template and seen.get("template") is False:
            yield Finding(
                "no-chat-template",
                spec.name,
                f"the weights of {one.model} have lost their chat template: after the next start "
                "every chat is 400",
                _files(wanted.directory, found["changed"])
                or f"{wanted.directory}: no chat_template in tokenizer_config.json or beside it",
                (*mend, restart),
            )
        elif found["changed"]:
            yield Finding(
                "weights-changed",
                spec.name,
                f"weights of {one.model} were changed since they were verified",
                _files(wanted.directory, found["changed"]),
                (*mend, restart),
            )
        told_already = {name for name, _ in found["changed"]}
        wrong = [name for name in found["wrong"] if name not in told_already]
        if wrong:
            yield Finding(
                "weights-differ",
                spec.name,
                f"weights of {one.model} are not the bytes that were verified",
                _files(wanted.directory, [[n, "has another sha256"] for n in wrong]),
                (*mend, restart),
            )


def _files(directory: str, changed: list[list[str]]) -> str:
    shown = [f"{directory}/{name} {what}" for name, what in changed[:3]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(shown) + more


# --- environment


def _environment(
    case: Case, spec: HostSpec, one: Instance, seen: Json, interfaces: list[str] | None
) -> Iterator[Finding]:
    found: Json = seen.get("environment") or {}
    left = {
        key: one_
        for key, one_ in found.items()
        if key in LEFT_OVER and _value(one_) not in HARMLESS.get(key, ("", "0"))
    }
    by_remedy: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for key, it in left.items():
        by_remedy.setdefault(_taken_out(case, spec, one, key, it), []).append(key)
    for (remedy, note), keys in by_remedy.items():
        yield Finding(
            "debugging-left",
            spec.name,
            "; ".join(f"{key}={_value(left[key])}: {LEFT_OVER[key]}" for key in keys),
            "set in " + _places(left[keys[0]]),
            remedy,
            note,
            instance=one.name,
        )
    alive = found.get(engine.KEEP_ALIVE)
    if alive and _value(alive).isdigit() and int(_value(alive)) <= IDLE_SECONDS:
        remedy, note = _taken_out(case, spec, one, engine.KEEP_ALIVE, alive)
        yield Finding(
            "keep-alive-short",
            spec.name,
            f"it closes idle connections after {_value(alive)} s, gateways after {IDLE_SECONDS} s",
            f"{engine.KEEP_ALIVE}, set in {_places(alive)}",
            remedy,
            note,
            instance=one.name,
        )
    for key in INTERFACES:
        if key not in found or interfaces is None:
            continue
        value = _value(found[key])
        if missing := missing_interfaces(key, value, interfaces):
            remedy, note = _taken_out(case, spec, one, key, found[key])
            yield Finding(
                "gloo-interface" if key.startswith("GLOO") else "nccl-no-interface",
                spec.name,
                f"{key}={value} names {', '.join(missing)}, and this host has no such interface",
                f"set in {_places(found[key])}; it has {', '.join(i for i in interfaces)}",
                remedy,
                note,
                instance=one.name,
                level="warning",
            )


def _hcas(
    case: Case, spec: HostSpec, state: HostState, one: Instance, seen: Json
) -> Iterator[Finding]:
    """NCCL_IB_HCA names devices by prefix, or whole with `=`."""
    it = (seen.get("environment") or {}).get("NCCL_IB_HCA")
    if it is None or _value(it).startswith("^"):
        return
    devices = sorted({port.partition(":")[0] for port in state.rdma})
    value = _value(it)
    exact, names = value.startswith("="), [n for n in value.lstrip("=").split(",") if n]
    missing = [
        name
        for name in names
        if not any(
            d == name.partition(":")[0] if exact else d.startswith(name.partition(":")[0])
            for d in devices
        )
    ]
    if missing:
        remedy, note = _taken_out(case, spec, one, "NCCL_IB_HCA", it)
        yield Finding(
            "nccl-no-interface",
            spec.name,
            f"NCCL_IB_HCA={value} names {', '.join(missing)}, and this host has no such device",
            f"set in {_places(it)}; it has {', '.join(devices) or 'no RDMA device'}",
            remedy,
            note,
            instance=one.name,
            level="warning",
        )


def missing_interfaces(key: str, value: str, interfaces: list[str]) -> list[str]:
    """The names in a list of interfaces that none of this host's answers to.

    NCCL takes prefixes, whole names after `=`, and what to leave out after `^`; Gloo whole names.
    """
    if value.startswith("^"):
        return []
    exact = value.startswith("=") or not key.startswith("NCCL")
    names = [name.strip() for name in value.lstrip("=").split(",") if name.strip()]
    return [
        name
        for name in names
        if not any(i == name if exact else i.startswith(name) for i in interfaces)
    ]


def _value(it: Json) -> str:
    """What the next start takes in; where no file has it, what runs."""
    return str(it["value"] if it["files"] else it["running"] or it["value"])


def _places(it: Json) -> str:
    return ", ".join(it["files"]) or "the running process alone"


def _taken_out(
    case: Case, spec: HostSpec, one: Instance, key: str, it: Json
) -> tuple[tuple[str, ...], str]:
    """Commands and words that take a variable out of where it is set."""
    model = spec.settings.models[one.model]
    restart = case.ssh(spec.name, f"systemctl restart vllm@{one.name}")
    if key in {**model.env, **one.env}:
        return (case.deploy(spec.name),), f"take {key} out of `env` in group_vars first"
    own = f"{paths.ETC}/{one.name}.env"
    commands = [
        case.ssh(spec.name, f"sed -i /{key}=/d {path} && systemctl daemon-reload")
        for path in dict.fromkeys(it["files"])
        if path != own
    ]
    if own in it["files"]:
        commands.append(case.deploy(spec.name))
    return (*commands, restart), ""


# --- restarts


def _restarts(case: Case, spec: HostSpec, one: Instance, seen: Json) -> Iterator[Finding]:
    restarts = seen.get("restarts") or {}
    count, log = restarts.get("count") or 0, str(restarts.get("log") or "")
    if not log or not (count or ENDED.search(log)):
        return
    found = match(log)
    best = found[0] if found else None
    own = last_error(log) if best is None or best.rank is Rank.GENERIC else ""
    times = "once" if count == 1 else f"{count} times" if count else "never"
    text = f"restarted {times} by systemd" if count else "its last start failed"
    if best is not None and not own:
        text += f": {best.cause}"
    clear = case.ssh(spec.name, f"systemctl reset-failed vllm@{one.name}")
    log_command = case.ssh(spec.name, f"journalctl -u vllm@{one.name} -n 400 --no-pager")
    yield Finding(
        best.id if best is not None and not own else "restarted",
        spec.name,
        text,
        best.line[:300] if best is not None and not own else own or _end_of(log),
        (f"{log_command} | fleet explain -", clear),
        best.remedy if best is not None and not own else "",
        instance=one.name,
        level="warning",
    )


def _end_of(log: str) -> str:
    lines = [line for line in log.splitlines() if ENDED.search(line)]
    return lines[-1].strip()[:300] if lines else log.strip().rpartition("\n")[2][:300]
