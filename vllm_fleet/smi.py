"""What nvidia-smi and rocm-smi print about cards, read into :class:`Card`. Pure.

Every shape in use is read: CSV queries (with or without header, units, renamed fields), ``-q -x``,
the plain table, ``-L``, the JSON and CSV of rocm-smi. A text that names no card raises
:class:`CardsError` with one sentence for the operator; what is only odd comes back as warnings.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.etree import ElementTree

from vllm_fleet.jsontext import parsed

Vendor = Literal["nvidia", "amd"]

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ABSENT = re.compile(
    r"^\[?(N/A|Not Supported|Not Available|Insufficient Permissions"
    r"|Requested functionality has been deprecated)\]?$",
    re.I,
)
BROKEN = re.compile(r"^(ERR!|\[?(Unknown Error|GPU is lost|GPU requires reset)\]?)$", re.I)
CARD_KEY = re.compile(r"card\d{1,4}")  # of rocm-smi
UUID = re.compile(r"^(GPU|MIG)-[0-9A-Za-z.-]+$")
BUS = re.compile(r"^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
QUERY = (
    "nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,memory.total,memory.used,compute_cap,"
    "driver_version,mig.mode.current --format=csv"
)

# What nvidia-smi says instead of an answer: pattern, meaning, remedy.
COMPLAINTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.I), sentence)
    for pattern, sentence in (
        (
            r"Driver/library version mismatch",
            "the NVIDIA driver was upgraded under the running kernel module; "
            "reload the modules or reboot the host",
        ),
        (
            r"couldn't communicate with the NVIDIA driver",
            "the NVIDIA kernel module is not loaded; install the driver for the running kernel, "
            "then `modprobe nvidia` or reboot",
        ),
        (
            r"No devices were found",
            "the driver runs and finds no card; look for `NVRM: Xid` and `fallen off the bus` in "
            "the kernel log, and for a card bound to vfio",
        ),
        (
            r"(nvidia-smi|rocm-smi): (command )?not found|No such file or directory",
            "nvidia-smi is not installed; install the NVIDIA driver",
        ),
        (
            r"The -i command line argument must be used",
            "this nvidia-smi refuses -i here; run `nvidia-smi topo -m` without it",
        ),
        (
            r"Insufficient Permissions",
            "nvidia-smi may not read the cards; run it as root or give the user /dev/nvidia*",
        ),
        (
            r"Failed to initialize NVML",
            "the NVIDIA driver does not answer; see the kernel log, then reload it or reboot",
        ),
    )
)
LOST = re.compile(
    r"Unable to determine the device handle for gpu ?(?P<bus>[0-9A-Fa-f:.]+): (?P<why>.+)", re.I
)


class CardsError(Exception):
    """A text about cards that cannot be used; the message is for the operator."""


@dataclass(frozen=True)
class Process:
    """One process that holds memory of a card."""

    pid: int
    name: str
    memory_mib: int | None
    card: str  # the card's UUID, bus id or index, as the text gives it


@dataclass(frozen=True)
class Card:
    """One card. None stands for what the text does not say."""

    index: int
    name: str
    vendor: Vendor = "nvidia"
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    uuid: str = ""
    bus_id: str = ""
    driver: str = ""
    capability: str = ""  # compute capability, such as "9.0"
    mig: bool | None = None
    slices: tuple[str, ...] = ()  # profiles of its MIG devices
    ecc: bool | None = None
    persistence: bool | None = None
    pcie: tuple[int, int, int, int] | None = None  # generation, its maximum, width, its maximum
    throttled: tuple[str, ...] = ()  # reasons that hold now, idle and power cap left out
    faults: tuple[str, ...] = ()  # each a reason to keep off it
    processes: tuple[Process, ...] = ()

    @property
    def short_name(self) -> str:
        """Name without the maker: "A100-SXM4-80GB"."""
        return re.sub(r"^(NVIDIA|AMD)\s+", "", self.name)


@dataclass(frozen=True)
class Listing:
    """The cards of one text, by index, and what was odd about it."""

    cards: tuple[Card, ...]
    warnings: tuple[str, ...] = ()


def parse_gpus(text: str) -> Listing:
    """Cards from any listing of nvidia-smi or rocm-smi; CardsError where it names none."""
    clean = ANSI.sub("", text).replace("\r\n", "\n")
    if not clean.strip():
        raise CardsError(f"the list of cards is empty; run {QUERY}")
    lost = [_lost_card(m) for m in LOST.finditer(clean)]
    body = LOST.sub("", clean)
    warnings: list[str] = [*lost]
    if body.lstrip().startswith(("<?xml", "<nvidia_smi_log")):
        cards = _from_xml(body, warnings)
    elif re.search(r"^\s*GPU \d+: .+\(UUID:", body, re.M):
        cards = _from_list(body)
    elif re.search(r"^\|\s+NVIDIA-SMI|^\+-{20,}", body, re.M):
        cards = _from_table(body, warnings)
    elif body.lstrip().startswith("{"):
        cards = _from_rocm_json(body)
    elif re.search(r"^device,", body, re.M):
        cards = _from_rocm_csv(body)
    else:
        cards = _from_csv(body, warnings)
    if not cards:
        raise CardsError("; ".join(lost) or complaint(clean) or _no_cards(clean))
    seen = [c.index for c in cards]
    if len(set(seen)) != len(seen):
        raise CardsError(
            "the list names one index twice: outputs of several hosts or runs are mixed up; "
            f"run {QUERY} once on one host"
        )
    return Listing(tuple(sorted(cards, key=lambda c: c.index)), tuple(warnings))


def parse_compute_apps(text: str) -> tuple[Process, ...]:
    """Processes from ``--query-compute-apps`` (any columns, header or none) or from the table."""
    clean = ANSI.sub("", text)
    if re.search(r"^\|\s+NVIDIA-SMI|^\| Processes:", clean, re.M):
        return tuple(_table_processes(clean))
    rows = [r for r in csv.reader(clean.splitlines(), skipinitialspace=True) if any(r)]
    if not rows:
        return ()
    header = [_column(c) for c in rows[0]]
    if "pid" in header:
        return tuple(p for row in rows[1:] if (p := _process(dict(zip(header, row, strict=False)))))
    found = tuple(p for row in rows if (p := _headless_process(row)))
    if not found:
        raise CardsError(complaint(clean) or _no_processes(clean))
    return found


def parse_versions(text: str) -> tuple[str, str]:
    """Driver and the CUDA it carries, from ``--version``, the table's head, ``-q -x`` or /proc.

    Driver 610 renamed both (KMD version, CUDA UMD version); "" for what is not said.
    """
    clean = ANSI.sub("", text)
    driver = cuda = ""
    patterns = {
        "driver": (
            r"KMD [Vv]ersion\s*:\s*([\d.]+)",
            r"D(?:RIVER|river) [Vv]ersion\s*:\s*([\d.]+)",
            r"<driver_version>([\d.]+)",
            r"Kernel Module(?: for \S+)?\s+([\d.]+)",
        ),
        "cuda": (
            r"CUDA UMD [Vv]ersion\s*:\s*([\d.]+)",
            r"CUDA [Vv]ersion\s*:\s*([\d.]+)",
            r"<cuda_version>([\d.]+)",
        ),
    }
    for pattern in patterns["driver"]:
        driver = driver or next(iter(re.findall(pattern, clean)), "")
    for pattern in patterns["cuda"]:
        cuda = cuda or next(iter(re.findall(pattern, clean)), "")
    return driver, cuda


@dataclass(frozen=True)
class KernelMessage:
    """One message of the NVIDIA kernel module that tells of a broken card."""

    bus_id: str  # "" where it names none
    xid: int | None
    text: str


def parse_kernel_log(text: str) -> tuple[KernelMessage, ...]:
    """Xid errors and lost or unclaimed cards in the kernel log."""
    joined = re.sub(r"\n(\[[^\]]*\]|\s)*NVRM:\s+(?=\(PCI ID|fallen off)", " ", text)
    found = []
    for line in joined.splitlines():
        if match := re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (.+)", line):
            found.append(KernelMessage(match[1], int(match[2]), match[3].strip()))
        elif match := re.search(
            r"NVRM: (?:The NVIDIA GPU ([0-9a-fA-F:.]+).*fallen off.*"
            r"|No NVIDIA graphics adapter probed.*|The NVIDIA probe routine .*)",
            line,
        ):
            said = match[0].removeprefix("NVRM: ").strip()
            found.append(KernelMessage(match[1] or "", None, said))
    return tuple(found)


def parse_nvlink_status(text: str) -> dict[int, str]:
    """What ``nvidia-smi nvlink -s`` says of each card: active, inactive, mig, or unsupported."""
    found: dict[int, str] = {}
    card: int | None = None
    for line in ANSI.sub("", text).splitlines():
        if match := re.match(r"\s*GPU (\d+):", line):
            card = int(match[1])
            found.setdefault(card, "unsupported")
        elif re.search(r"not supported for Devices in MIG", line, re.I):
            found.update({card: "mig"} if card is not None else {})
        elif re.search(r"all links are inActive", line, re.I):
            found.update({card: "inactive"} if card is not None else {})
        elif re.search(r"Link \d+: [\d.]+ GB/s", line) and card is not None:
            found[card] = "active"
    return found


def attach(cards: Sequence[Card], processes: Iterable[Process]) -> tuple[Card, ...]:
    """The cards, each with the processes that name it by UUID, bus id or index."""
    given = tuple(processes)
    masked = len({c.uuid for c in cards}) < len(cards)  # one UUID for all: told apart by bus

    def own(card: Card) -> tuple[Process, ...]:
        names = {str(card.index), _bus(card.bus_id)} - {""}
        if card.uuid and not masked:
            names.add(card.uuid)
        return tuple(p for p in given if _bus(p.card) in names or p.card in names)

    return tuple(replace(c, processes=c.processes + own(c)) for c in cards)


def complaint(text: str) -> str | None:
    """What an error text of nvidia-smi means, with the remedy; None where it is none known."""
    for pattern, sentence in COMPLAINTS:
        if pattern.search(text):
            return f"nvidia-smi failed: {sentence}"
    match = LOST.search(text)
    return _lost_card(match) if match else None


# -- CSV


def _from_csv(text: str, warnings: list[str]) -> list[Card]:
    rows = [r for r in csv.reader(text.splitlines(), skipinitialspace=True) if any(r)]
    if not rows:
        return []
    header = [_column(c) for c in rows[0]]
    known = {"index", "name", "gpu_name", "memory.total", "uuid", "gpu_uuid", "pci.bus_id"}
    if "pid" in header or "process_name" in header:
        raise CardsError(f"this is a list of processes, not of cards; run {QUERY}")
    if not known & set(header):
        return _headless_cards(rows, warnings)
    cards = []
    for number, row in enumerate(rows[1:]):
        if complaint(", ".join(row)):
            warnings.append(complaint(", ".join(row)) or "")
            continue
        if _column(row[0]) == header[0] and [_column(c) for c in row] == header:
            raise CardsError(
                "the list has two header lines: outputs of several hosts or runs are mixed up; "
                f"run {QUERY} once on one host"
            )
        if len(row) != len(header):
            warnings.append(
                f"row {number + 1} has {len(row)} of {len(header)} columns: the output is cut off; "
                "its card is left out, run the query again"
            )
            continue
        values = dict(zip(header, row, strict=True))
        index = _number(values.get("index", ""))
        if "index" in values and index is None:
            warnings.append(f"row {number + 1} has no index ({values['index']}): left out")
            continue
        cards.append(_csv_card(values, number if index is None else index))
    if cards and "index" not in header:
        warnings.append("no column `index`: cards are numbered by their order in the list")
    if cards and not {"name", "gpu_name"} & set(header):
        warnings.append(f"no column `name`: the kind of card is unknown; run {QUERY}")
    if cards and "memory.total" not in header:
        warnings.append(f"no column `memory.total`: memory is unknown; run {QUERY}")
    if not cards and len(rows) == 1:
        raise CardsError("the list has a header and no card: " + (_no_cards("") or ""))
    return cards


def _csv_card(values: dict[str, str], index: int) -> Card:
    def get(*names: str) -> str:
        return next((values[n] for n in names if values.get(n)), "")

    faults = [f"nvidia-smi answers {v!r} for {k}" for k, v in values.items() if BROKEN.match(v)]
    for name, bad, sentence in (
        ("remapped_rows.failure", "yes", "a row of its memory could not be remapped: replace it"),
        ("remapped_rows.pending", "yes", "remapped memory rows wait for a reset of the card"),
        ("retired_pages.pending", "yes", "retired memory pages wait for a reset of the card"),
    ):
        if values.get(name, "").lower() == bad:
            faults.append(sentence)
    faults += _ecc_faults(_number(get("ecc.errors.uncorrected.volatile.total")))
    faults += _recovery_faults(get("gpu_recovery_action"))
    faults += _fabric_faults(get("fabric.state"), get("fabric.status"))
    reasons = [
        k.split(".", 1)[1]
        for k, v in values.items()
        if v == "Active" and re.match(r"clocks_(event|throttle)_reasons\.(hw_|sw_thermal)", k)
    ]
    pcie = tuple(
        _number(get(f"pcie.link.{n}"))
        for n in ("gen.current", "gen.max", "width.current", "width.max")
    )
    return Card(
        index=index,
        name=_text(get("name", "gpu_name")) or "unknown card",
        memory_mib=_mib(get("memory.total")),
        memory_used_mib=_mib(get("memory.used")),
        uuid=_text(get("uuid", "gpu_uuid")),
        bus_id=_text(get("pci.bus_id", "gpu_bus_id")),
        driver=_text(get("kmd_version")) or _text(get("driver_version")),
        capability=_text(get("compute_cap")),
        mig=_switch(get("mig.mode.current")),
        ecc=_switch(get("ecc.mode.current")),
        persistence=_switch(get("persistence_mode")),
        pcie=_pcie(pcie),
        throttled=tuple(reasons),
        faults=tuple(faults),
    )


def _headless_cards(rows: list[list[str]], warnings: list[str]) -> list[Card]:
    """Cards from a CSV without a header: only values that name themselves are taken."""
    cards = []
    for number, row in enumerate(rows):
        said = complaint(", ".join(row))
        if said:
            warnings.append(said)
            continue
        index = _number(row[0]) if re.fullmatch(r"\d+", row[0].strip()) else None
        name_at = next((i for i, v in enumerate(row) if _is_name(v)), None)
        if name_at is None or len(row) < 2:
            continue
        total, used = _headless_memory(row, name_at)
        cards.append(
            Card(
                index=number if index is None else index,
                name=row[name_at],
                memory_mib=total,
                memory_used_mib=used,
                uuid=next((v for v in row if UUID.match(v)), ""),
                bus_id=next((v for v in row if BUS.match(v)), ""),
                driver=next((v for v in row if re.fullmatch(r"\d{3}\.\d+(\.\d+)?", v)), ""),
                capability=next((v for v in row if re.fullmatch(r"\d{1,2}\.\d", v)), ""),
            )
        )
    if cards:
        warnings.append(
            "the list has no header line: columns are told by the form of their values; "
            "leave `noheader` out to have all of them read"
        )
    return cards


def _headless_memory(row: list[str], name_at: int) -> tuple[int | None, int | None]:
    """Memory of a row without header: values in MiB, the larger being the whole."""
    sizes = [m for v in row if re.fullmatch(r"\d+ MiB", v) and (m := _mib(v)) is not None]
    if sizes:
        return max(sizes), (min(sizes) if len(sizes) == 2 else None)
    if name_at + 1 < len(row):  # nounits: name, memory.total, ...
        bare = row[name_at + 1]
        if re.fullmatch(r"\d{4,7}", bare):
            return int(bare), None
    return None, None


def _is_name(value: str) -> bool:
    known = r"(NVIDIA|AMD|Tesla|Quadro|GeForce|GRID|Radeon|Instinct)[ \-](?!SMI\b)\w"
    return bool(re.match(known, value))


def _column(cell: str) -> str:
    """A column's name without its unit."""
    return re.sub(r"\s*\[[^\]]*\]$", "", cell.strip())


# -- XML


def _from_xml(text: str, warnings: list[str]) -> list[Card]:
    try:
        root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text.strip()))
    except ElementTree.ParseError as error:
        return _whole_cards(text, warnings, error)
    driver = _text(root.findtext("driver_version") or "")
    return [_xml_card(n, gpu, driver) for n, gpu in enumerate(root.iter("gpu"))]


def _whole_cards(text: str, warnings: list[str], error: ElementTree.ParseError) -> list[Card]:
    """The cards that are whole in damaged XML, each with the number it has there."""
    found = {}
    for match in re.finditer(r"<gpu id=.*?</gpu>", text, re.S):
        try:
            gpu = ElementTree.fromstring(match[0])
        except ElementTree.ParseError:
            continue
        found[text.count("<gpu id=", 0, match.start())] = gpu
    if not found:
        raise CardsError(
            f"the XML of nvidia-smi is cut off or damaged ({error}); run nvidia-smi -q -x again"
        ) from error
    warnings.append(
        f"the XML is cut off or damaged, {len(found)} cards of it can be read; "
        "run nvidia-smi -q -x again"
    )
    head = re.search(r"<driver_version>([^<>&]*)</driver_version>", text)
    driver = _text(head[1] if head else "")
    return [_xml_card(n, gpu, driver) for n, gpu in found.items()]


def _xml_card(number: int, gpu: ElementTree.Element, driver: str) -> Card:
    def get(path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    ecc = [
        _number(get(f"ecc_errors/volatile/{n}")) or 0
        for n in ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")
    ]
    faults = [
        *_ecc_faults(sum(ecc)),
        *_recovery_faults(get("gpu_recovery_action")),
        *_fabric_faults(get("fabric/state"), get("fabric/status")),
    ]
    if get("remapped_rows/remapped_row_failure") == "Yes":
        faults.append("a row of its memory could not be remapped: replace it")
    if get("remapped_rows/remapped_row_pending") == "Yes":
        faults.append("remapped memory rows wait for a reset of the card")
    links = "pci/pci_gpu_link_info"
    pcie = (
        _number(get(f"{links}/pcie_gen/current_link_gen")),
        _number(get(f"{links}/pcie_gen/max_link_gen")),
        _number(get(f"{links}/link_widths/current_link_width").rstrip("x")),
        _number(get(f"{links}/link_widths/max_link_width").rstrip("x")),
    )
    uuid = get("uuid")
    processes = tuple(
        Process(
            int(p.findtext("pid") or 0),
            (p.findtext("process_name") or "").strip(),
            _mib(p.findtext("used_memory") or ""),
            uuid,
        )
        for p in gpu.iter("process_info")
        if (p.findtext("pid") or "").strip().isdigit()
    )
    reasons = [
        e.tag.removeprefix("clocks_event_reason_")
        for e in gpu.iterfind("clocks_event_reasons/*")
        if re.search(r"hw_|sw_thermal", e.tag) and (e.text or "").strip() == "Active"
    ]
    return Card(
        index=number,
        name=get("product_name") or "unknown card",
        memory_mib=_mib(get("fb_memory_usage/total")),
        memory_used_mib=_mib(get("fb_memory_usage/used")),
        uuid=uuid,
        bus_id=gpu.get("id") or get("pci/pci_bus_id"),
        driver=driver,
        mig=_switch(get("mig_mode/current_mig")),
        ecc=_switch(get("ecc_mode/current_ecc")),
        persistence=_switch(get("persistence_mode")),
        pcie=_pcie(pcie),
        throttled=tuple(reasons),
        faults=tuple(faults),
        processes=processes,
    )


# -- the table, and -L

TABLE_ROW = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?P<persistence>On|Off)\s+\|"
    r"\s+(?P<bus>[0-9A-Fa-f]+:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s+(?:On|Off)\s*\|"
    r"\s+(?P<ecc>\S.*?)\s*\|"
)


def _from_table(text: str, warnings: list[str]) -> list[Card]:
    driver, _ = parse_versions(text)
    lines = text.splitlines()
    cards = []
    for number, line in enumerate(lines):
        match = TABLE_ROW.match(line)
        if match is None:
            continue
        below = lines[number + 1] if number + 1 < len(lines) else ""
        third = lines[number + 2] if number + 2 < len(lines) else ""
        memory = re.search(r"(\d+)MiB\s*/\s*(\d+)MiB", below)
        if not below.startswith("|"):
            warnings.append(f"the table is cut off at card {match['index']}: it is left out")
            continue
        mig_cell = third.rstrip(" |").rsplit("|", 1)[-1].strip() if third.startswith("|") else ""
        name = match["name"]
        if name.endswith("..."):
            warnings.append(
                f"the table shortens the name of card {match['index']} ({name}); run {QUERY}"
            )
        cards.append(
            Card(
                index=int(match["index"]),
                name=name,
                memory_mib=int(memory[2]) if memory else None,
                memory_used_mib=int(memory[1]) if memory else None,
                bus_id=match["bus"],
                driver=driver,
                mig=_switch(mig_cell),
                ecc=match["ecc"] not in {"N/A", "Off"},
                persistence=match["persistence"] == "On",
                faults=tuple(_ecc_faults(_number(match["ecc"]))),
            )
        )
    return list(attach(cards, _table_processes(text)))


def _table_processes(text: str) -> Iterator[Process]:
    body = text.partition("Processes:")[2]
    for match in re.finditer(
        r"^\|\s+(\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+([CGM+]+)\s+(\S.*?)\s+(\d+)MiB\s*\|",
        body,
        re.M,
    ):
        yield Process(int(match[2]), match[4], int(match[5]), match[1])


def _from_list(text: str) -> list[Card]:
    cards: list[Card] = []
    for line in text.splitlines():
        if match := re.match(r"\s*GPU (\d+): (.+?) \(UUID: (\S+?)\)", line):
            cards.append(Card(int(match[1]), match[2], uuid=match[3]))
        elif (match := re.match(r"\s+MIG (\S+)\s+Device", line)) and cards:
            cards[-1] = replace(cards[-1], mig=True, slices=(*cards[-1].slices, match[1]))
    return cards


# -- rocm-smi


def _from_rocm_json(text: str) -> list[Card]:
    try:
        data = parsed(text)
    except ValueError as error:
        raise CardsError(
            f"the JSON of rocm-smi is cut off or damaged ({error}); run it again"
        ) from error
    rows = {k: v for k, v in data.items() if re.fullmatch(CARD_KEY, k) and isinstance(v, dict)}
    return [
        _rocm_card(int(key[4:]), {str(k).lower(): str(v) for k, v in values.items()})
        for key, values in rows.items()
    ]


def _from_rocm_csv(text: str) -> list[Card]:
    start = text.index("device,")
    rows = list(csv.DictReader(text[start:].splitlines()))
    return [
        _rocm_card(int(row["device"][4:]), {str(k).lower(): str(v) for k, v in row.items() if k})
        for row in rows
        if re.fullmatch(CARD_KEY, row.get("device") or "")
    ]


def _rocm_card(index: int, values: dict[str, str]) -> Card:
    def get(*parts: str) -> str:
        return next((v for k, v in values.items() if all(p in k for p in parts)), "")

    def mib(value: str) -> int | None:
        number = _number(value)
        return None if number is None else number // 2**20

    return Card(
        index=index,
        name=_text(get("card series") or get("card model")) or "unknown card",
        vendor="amd",
        memory_mib=mib(get("vram total memory")),
        memory_used_mib=mib(get("vram total used")),
        uuid=_text(get("unique id")),
        bus_id=_text(get("pci bus")),
    )


# -- processes


def _process(values: dict[str, str]) -> Process | None:
    pid = _number(values.get("pid", ""))
    if pid is None:
        return None
    card = values.get("gpu_bus_id") or values.get("gpu_uuid") or values.get("gpu_index") or ""
    memory = values.get("used_gpu_memory") or values.get("used_memory") or ""
    return Process(pid, values.get("process_name") or values.get("name") or "", _mib(memory), card)


def _headless_process(row: list[str]) -> Process | None:
    card = next((v for v in row if UUID.match(v) or BUS.match(v)), "")
    numbers = [i for i, v in enumerate(row) if re.fullmatch(r"\d+", v)]
    if not numbers:
        return None
    memory = next((_mib(v) for v in row if v.endswith("MiB")), None)
    if memory is None and len(numbers) > 1:
        memory = int(row[numbers[-1]])
    name = next((v for v in row if re.search(r"[A-Za-z/]", v) and v != card and "MiB" not in v), "")
    return Process(int(row[numbers[0]]), name, memory, card)


# -- values


def _number(value: str) -> int | None:
    match = re.fullmatch(r"\s*(\d+)(?:\s*(?:MiB|%|B))?\s*", value)
    return int(match[1]) if match else None


def _mib(value: str) -> int | None:
    match = re.fullmatch(r"\s*(\d+)(?:\.\d+)?\s*(MiB|GiB)?\s*", value)
    if match is None:
        return None
    return int(match[1]) * (1024 if match[2] == "GiB" else 1)


def _text(value: str) -> str:
    return "" if ABSENT.match(value.strip()) or BROKEN.match(value.strip()) else value.strip()


def _switch(value: str) -> bool | None:
    return {"enabled": True, "disabled": False, "on": True, "off": False}.get(value.strip().lower())


def _pcie(values: Sequence[int | None]) -> tuple[int, int, int, int] | None:
    a, b, c, d = values
    return None if a is None or b is None or c is None or d is None else (a, b, c, d)


def _ecc_faults(count: int | None) -> list[str]:
    if not count:
        return []
    return [f"{count} uncorrected memory errors since the last reset: reset or replace it"]


def _recovery_faults(action: str) -> list[str]:
    if not _text(action) or action == "None":
        return []
    return [f"the driver asks for recovery: {action}"]


def _fabric_faults(state: str, status: str) -> list[str]:
    if _text(state) and state != "Completed":
        return [f"its NVSwitch fabric is {state!r}: start nvidia-fabricmanager of the same version"]
    if _text(status) and status != "Success":
        return [f"its NVSwitch fabric failed ({status}): see journalctl -u nvidia-fabricmanager"]
    return []


def _bus(value: str) -> str:
    """A bus id without leading zeros of its domain, to compare two spellings."""
    return value.lower().lstrip("0") if BUS.match(value) else value


def _lost_card(match: re.Match[str]) -> str:
    bus = match["bus"].strip(":")
    return (
        f"nvidia-smi failed: the card at {bus} does not answer ({match['why'].strip()}); see the "
        "kernel log for Xid 79, then reseat or reboot; the cards after it are renumbered"
    )


def _first_line(text: str) -> str:
    line = next((s for s in text.splitlines() if s.strip()), "").strip()
    return line if len(line) <= 80 else f"{line[:77]}..."


def _no_cards(text: str) -> str:
    if re.search(r"^\s*GPU0\s+(X|GPU1|CPU Affinity)", text, re.M):
        return f"this is the matrix of links (topo -m), not the list of cards; run {QUERY}"
    said = f", it begins with {_first_line(text)!r}" if text.strip() else ""
    return f"this is no list of cards{said}; run {QUERY}"


def _no_processes(text: str) -> str:
    return (
        f"this is no list of processes, it begins with {_first_line(text)!r}; run nvidia-smi "
        "--query-compute-apps=gpu_bus_id,gpu_uuid,pid,process_name,used_memory --format=csv"
    )
