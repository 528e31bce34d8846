"""The files of one instance, and those that all instances of a host share. Pure."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from vllm_fleet import engine, jsontext, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import PlannedInstance, PlannedSpan
from vllm_fleet.render import render
from vllm_fleet.spec.model import Device

UNITS = "/etc/systemd/system"
SCRIPTS = (
    "gate",
    "before_start",
    "warmup",
    "bootlog",
    "stop",
    "span",
    "ray_nodes",
)  # in vllm_fleet/gate, put to paths.LIB
START_LIMIT_BURST = 4
SPAN_START_LIMIT_BURST = 20  # a rank begins anew with each loss of another one as well
SHUTDOWN_SECONDS = 30  # from SIGTERM to SIGKILL; stop.py has the same
JOURNAL_GIB = 4
SLACK_SECONDS = 30  # by which systemd's limits come after the scripts' own

# What the plan decides, and the gate, the warm-up and gateways rely on.
RESERVED_ENV = {
    **dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES"),
        "cards are chosen by `cards`",
    ),
    engine.KEEP_ALIVE: "gateways close idle connections before the engine does",
}
RESERVED_ENV_PREFIX = "FLEET_"
# Nothing that is cached by one release is read by another, and no instance writes another's:
# kernels compiled for one version have poisoned the next.
CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "HF_HOME": "huggingface",
    "MODELSCOPE_CACHE": "modelscope",
    "NUMBA_CACHE_DIR": "numba",
    "OUTLINES_CACHE_DIR": "outlines",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "XDG_CACHE_HOME": "xdg",
}


class InstanceError(ValueError):
    """Environment that cannot be passed on; says which and what to do."""


def files(instance: PlannedInstance) -> list[ManagedFile]:
    """Launch script, drop-in and environment of one instance, in the order to write them.

    The environment comes last: it carries the checksum of the others, which a process that
    starts half way through must not claim. Raises :class:`InstanceError` or
    :class:`vllm_fleet.engine.EngineError` on settings that cannot be passed on.
    """
    script, environment = _texts(instance)
    environment += f"FLEET_CHECKSUM={quote_env(running_checksum(instance))}\n"
    planned = jsontext.lines(instance.expected)
    return [
        *(
            # Not part of the checksum: what is only expected is no reason to restart.
            [ManagedFile(f"{paths.ETC}/{instance.name}.plan.json", planned)]
            if instance.expected
            else []
        ),
        ManagedFile(f"{paths.ETC}/{instance.name}.sh", script, mode=0o755),
        ManagedFile(f"{UNITS}/{instance.unit}.d/10-instance.conf", _drop_in(instance)),
        ManagedFile(
            f"{paths.ETC}/{instance.name}.env",
            environment,
            mode=0o640,
            group=paths.USER,
            secret=True,  # operators put tokens here
        ),
    ]


def paths_of(name: str) -> list[str]:
    """Every path that files of an instance may have, as :func:`files` and onhost/switch.py do."""
    return [
        f"{paths.ETC}/{name}.plan.json",
        f"{paths.ETC}/{name}.sh",
        f"{UNITS}/vllm@{name}.service.d/10-instance.conf",
        f"{paths.ETC}/{name}.env",
    ]


def host_files(device: Device, *, hold_driver_packages: bool = True) -> list[ManagedFile]:
    """What all instances of a host share: scripts, template unit, rules for upgrades."""
    shared = [ManagedFile(f"{paths.LIB}/{name}.py", _source(name), mode=0o644) for name in SCRIPTS]
    shared.append(ManagedFile(f"{UNITS}/vllm@.service", _unit()))
    if device == "cuda":
        nodes = render("vllm/vllm-device-nodes.service.j2", mark=paths.MARK)
        shared.append(ManagedFile(f"{UNITS}/vllm-device-nodes.service", nodes))
    shared.append(
        ManagedFile(
            "/etc/needrestart/conf.d/vllm-fleet.conf",
            render("vllm/needrestart.conf.j2", mark=paths.MARK),
        )
    )
    if hold_driver_packages and device != "cpu":
        shared.append(
            ManagedFile(
                "/etc/apt/apt.conf.d/52vllm-fleet",
                render("vllm/apt-driver.conf.j2", mark=paths.MARK),
            )
        )
    return shared


def journal_limits() -> ManagedFile:
    """Disk that the journal may take: engines log for months, and the root disk is small.

    Core dumps are off by the unit itself (LimitCORE): one would be as large as the cards.
    """
    text = f"# {paths.MARK}\n[Journal]\nSystemMaxUse={JOURNAL_GIB}G\n"
    return ManagedFile("/etc/systemd/journald.conf.d/vllm-fleet.conf", text)


def running_checksum(instance: PlannedInstance) -> str:
    """Checksum, in hex, of everything that a process takes in when it starts.

    A process started with another one needs a restart. Limits of time are not part of it:
    they hold from the next daemon-reload on.
    """
    kept = vars(instance)
    if "_checksum" not in kept:
        digest = hashlib.sha256()
        # The gate runs inside the server, and of a span ours around it.
        around = []
        if instance.span is not None:
            around = [_source("span"), json.dumps(instance.span.fabric)]
        for part in (*_texts(instance), _unit(), _source("gate"), *around):
            digest.update(_less_comments(part))
        kept["_checksum"] = digest.hexdigest()
    return str(kept["_checksum"])


@lru_cache(maxsize=64)  # the unit and the gate are the same for all
def _less_comments(text: str) -> bytes:
    """A text as it counts in a checksum: a reworded comment is no reason to restart."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return "\n".join(lines).encode() + b"\0"


def _texts(instance: PlannedInstance) -> tuple[str, str]:
    """Launch script, and environment without the checksum.

    A plan asks three times for them and for their checksum, so both are kept with the instance,
    as a cached property is.
    """
    kept = vars(instance)
    if "_texts" not in kept:
        kept["_texts"] = _script(instance), _env_file(instance, _environment(instance))
    found: tuple[str, str] = kept["_texts"]
    return found


# What needs no escape and is no control character.
_PLAIN = re.compile(r"""[^\x00-\x1f\x7f"\\$`]*""")


@lru_cache(maxsize=8192)
def quote_env(value: str) -> str:
    """A value as systemd reads it back from an EnvironmentFile, without expansion.

    Raises :class:`InstanceError` on characters that systemd drops or refuses.
    """
    if _PLAIN.fullmatch(value):
        return f'"{value}"'
    if bad := [c for c in value if (ord(c) < 32 and c not in "\t\n") or ord(c) == 127]:
        raise InstanceError(f"holds the control character {bad[0]!r}; systemd refuses it")
    escaped = "".join(f"\\{c}" if c in '"\\$`' else c for c in value)
    return f'"{escaped}"'


def _environment(instance: PlannedInstance) -> dict[str, str]:
    for key in instance.env:
        if key in RESERVED_ENV or key.startswith(RESERVED_ENV_PREFIX):
            why = RESERVED_ENV.get(key, "the gate and the warm-up go by it")
            raise InstanceError(
                f"instance {instance.name} on {instance.host}: env `{key}` is set by the plan; "
                f"take it out ({why})"
            )
    state = f"{paths.STATE}/{instance.name}"
    release = f"{paths.RELEASES}/{instance.release}"
    cards = ",".join(str(card) for card in instance.cards)
    environment = {
        "FLEET_INSTANCE": instance.name,
        "FLEET_HOST": instance.host,
        "FLEET_DEVICE": instance.device,
        "FLEET_CARDS": cards,
        "FLEET_CARD_UUIDS": ",".join(instance.uuids),
        "FLEET_PORT": str(instance.port),
        "FLEET_MODEL": instance.model_name,
        "FLEET_TASK": instance.model.task,
        "FLEET_TOOLS": "1" if engine.has_tools(instance.args) else "0",
        "FLEET_RELEASE": release,
        "FLEET_WEIGHTS": instance.weights,
        "FLEET_RUN": f"{paths.RUN}/{instance.name}",
        "FLEET_STATE": state,
        "FLEET_USER": paths.USER,
    }
    if instance.model.adapters:
        directories = [one.path for one in instance.model.adapters.values()]
        environment["FLEET_ADAPTERS"] = json.dumps(directories)
    if instance.device == "cuda":
        # Absolute indices as nvidia-smi numbers them: vLLM cannot read UUIDs of MIG here, and
        # CUDA's own order differs from nvidia-smi's on hosts with unlike cards.
        environment["CUDA_VISIBLE_DEVICES"] = cards
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    elif instance.device == "rocm":
        environment["HIP_VISIBLE_DEVICES"] = cards
    if instance.span is not None:
        environment |= _span_environment(instance, instance.span)
    environment |= {
        "HOME": state,
        **{key: f"{_cache(instance)}/{folder}" for key, folder in CACHES.items()},
        # ninja and compilers of the release first; nvcc where the host has one
        "PATH": f"{release}/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin"
        ":/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": paths.LIB,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # weights are verified files; nothing is fetched at a start
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        engine.KEEP_ALIVE: str(engine.KEEP_ALIVE_SECONDS),
        "VLLM_LOGGING_COLOR": "0",
    }
    for key, value in instance.env.items():
        environment[key] = f"{paths.LIB}:{value}" if key == "PYTHONPATH" and value else value
    return environment


def _span_environment(instance: PlannedInstance, span: PlannedSpan) -> dict[str, str]:
    """What gate/span.py goes by. The rest of the network is found on the host itself."""
    settings = span.settings
    alike = replace(instance, span=replace(span, rank=0), host="", name="", cards=(), port=0)
    return {
        "FLEET_SPAN": span.name,
        "FLEET_RANK": str(span.rank),
        "FLEET_RANKS": ",".join(
            f"{host}={address}" for host, address in zip(span.hosts, span.addresses, strict=True)
        ),
        "FLEET_WATCH_PORT": str(settings.watch_port),
        "FLEET_SPAN_PORTS": ",".join(
            f"{name}={port}" for name, port in settings.ports(span.rank).items()
        ),
        "FLEET_SILENT_SECONDS": str(settings.silent_seconds),
        "FLEET_JOIN_SECONDS": str(settings.join_seconds),
        "FLEET_EXECUTOR": settings.executor,
        "FLEET_RAY_PORT": str(settings.ray_port),
        # Ranks that were deployed with other settings than the others must not meet.
        "FLEET_SETTINGS": hashlib.sha256(json.dumps(engine.command(alike)).encode()).hexdigest()[
            :12
        ],
        "VLLM_HOST_IP": span.address,
    }


def _cache(instance: PlannedInstance) -> str:
    return f"{paths.STATE}/{instance.name}/cache/{instance.release}"


def _env_file(instance: PlannedInstance, environment: dict[str, str]) -> str:
    quoted = {}
    for key, value in environment.items():
        try:
            quoted[key] = quote_env(value)
        except InstanceError as error:
            raise InstanceError(
                f"instance {instance.name} on {instance.host}: env `{key}` {error}"
            ) from None
    return render("vllm/instance.env.j2", mark=paths.MARK, name=instance.name, environment=quoted)


def _script(instance: PlannedInstance) -> str:
    command = engine.command(instance)
    if instance.span is not None:
        if instance.span.settings.executor == "ray":
            wait = [f"{paths.RELEASES}/{instance.release}/bin/python", f"{paths.LIB}/ray_nodes.py"]
            command = [[*wait, str(len(instance.span.hosts))], *command]
        command = [["/usr/bin/python3", "-s", "-E", f"{paths.LIB}/span.py"], *command]
    return render(
        "vllm/instance.sh.j2",
        mark=paths.MARK,
        name=instance.name,
        directories=" ".join(f'"${key}"' for key in CACHES),
        command=engine.shell(command),
    )


def _drop_in(instance: PlannedInstance) -> str:
    return render(
        "vllm/instance.conf.j2",
        mark=paths.MARK,
        name=instance.name,
        model_name=instance.model_name,
        port=instance.port,
        weights=_unit_path(instance.weights),
        start_limit_seconds=max(600, instance.start_seconds),
        start_limit_burst=START_LIMIT_BURST if instance.span is None else SPAN_START_LIMIT_BURST,
        start_seconds=instance.start_seconds,
        drain_seconds=instance.drain_seconds,
        # A rank of a span waits for the others as long as it takes, with nothing loaded.
        timeout_start="infinity"
        if instance.span is not None
        else str(instance.start_seconds + SLACK_SECONDS),
        timeout_stop_seconds=instance.drain_seconds + SHUTDOWN_SECONDS + SLACK_SECONDS,
        rocm=instance.device == "rocm",
        span=instance.span is not None,
        etc=paths.ETC,
    )


def _unit_path(path: str) -> str:
    """A path as a unit file reads it: `%` begins a specifier, blanks part two paths."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if shlex.quote(path) != path else escaped


@cache
def _unit() -> str:
    return render(
        "vllm/vllm@.service.j2",
        mark=paths.MARK,
        opt=paths.OPT,
        state=paths.STATE,
        etc=paths.ETC,
        lib=paths.LIB,
        user=paths.USER,
    )


@cache
def _source(name: str) -> str:
    """One of our scripts, with our mark first."""
    text = (Path(__file__).parent / "gate" / f"{name}.py").read_text(encoding="utf-8")
    shebang = "#!/usr/bin/python3\n"
    return f"{shebang}# {paths.MARK}\n{text.removeprefix(shebang)}"
