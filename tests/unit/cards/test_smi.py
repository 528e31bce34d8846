"""Listings of cards in every shape, in texts of our own."""

from __future__ import annotations

import pytest

from tests.unit.cards.made import gpus, matrix, uniform
from vllm_fleet.cards import CardsError, attach, complaint, parse_compute_apps, parse_gpus
from vllm_fleet.smi import Card, parse_kernel_log, parse_nvlink_status, parse_versions

TABLE = """\
Mon Jan  4 10:00:00 2027
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 610.20.01              KMD Version: 610.20.01     CUDA UMD Version: 13.3     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    2 |
| N/A   40C    P0            120W /  700W |    2000MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:43:00.0 Off |                   On |
| N/A   40C    P0            120W /  700W | Not Supported          |     N/A      Default |
|                                         |                        |              Enabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A            4711      C   python3                                1990MiB |
+-----------------------------------------------------------------------------------------+
"""

XML = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
 <driver_version>580.10.02</driver_version>
 <cuda_version>13.0</cuda_version>
 <gpu id="00000000:1B:00.0">
  <product_name>NVIDIA L40S</product_name>
  <uuid>GPU-aa</uuid>
  <persistence_mode>Enabled</persistence_mode>
  <mig_mode><current_mig>N/A</current_mig></mig_mode>
  <fb_memory_usage><total>46068 MiB</total><used>900 MiB</used></fb_memory_usage>
  <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
  <ecc_errors><volatile><dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
  <remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>
  <pci><pci_gpu_link_info>
   <pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
   <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width>
   </link_widths>
  </pci_gpu_link_info></pci>
  <clocks_event_reasons>
   <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <processes><process_info><pid>77</pid><process_name>trainer</process_name>
   <used_memory>880 MiB</used_memory></process_info></processes>
 </gpu>
</nvidia_smi_log>
"""


def test_csv_with_units_and_header() -> None:
    listing = parse_gpus(gpus(2, used={1: 30000}))
    assert listing.warnings == ()
    first, second = listing.cards
    assert (first.index, first.short_name, first.memory_mib) == (0, "A100-SXM4-80GB", 81920)
    assert (second.memory_used_mib, second.uuid) == (30000, "GPU-00000001")


def test_csv_without_header_takes_only_what_names_itself() -> None:
    listing = parse_gpus("0, NVIDIA L4, 23034, 12\n1, NVIDIA L4, 23034, 12\n")
    assert [(c.index, c.name, c.memory_mib) for c in listing.cards] == [
        (0, "NVIDIA L4", 23034),
        (1, "NVIDIA L4", 23034),
    ]
    assert "no header line" in listing.warnings[0]


def test_unified_memory_gives_no_figure() -> None:
    (card,) = parse_gpus("index, name, memory.total [MiB]\n0, NVIDIA GB10, [N/A]\n").cards
    assert card.memory_mib is None


def test_fields_renamed_by_driver_610() -> None:
    text = (
        "index, name, driver_version, kmd_version, memory.total [MiB]\n"
        "0, NVIDIA L4, [Requested functionality has been deprecated], 610.20.01, 23034 MiB\n"
    )
    assert parse_gpus(text).cards[0].driver == "610.20.01"
    assert parse_versions(TABLE) == ("610.20.01", "13.3")
    deprecated = (
        'DRIVER version      : Deprecated, see "KMD version" instead\nKMD version : 610.2\n'
    )
    assert parse_versions(deprecated) == ("610.2", "")


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("gpu_recovery_action", "Node Reboot Required", "asks for recovery"),
        ("ecc.errors.uncorrected.volatile.total", "3", "3 uncorrected memory errors"),
        ("remapped_rows.failure", "Yes", "could not be remapped"),
        ("remapped_rows.pending", "Yes", "wait for a reset"),
        ("fabric.state", "In Progress", "nvidia-fabricmanager"),
        ("memory.used [MiB]", "[GPU is lost]", "GPU is lost"),
        ("temperature.gpu", "[Unknown Error]", "Unknown Error"),
    ],
)
def test_faults_of_a_card(column: str, value: str, fault: str) -> None:
    text = f"index, name, memory.total [MiB], {column}\n0, NVIDIA H100, 81559 MiB, {value}\n"
    (card,) = parse_gpus(text).cards
    assert any(fault in f for f in card.faults)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("gpu_recovery_action", "None"),
        ("ecc.errors.uncorrected.volatile.total", "0"),
        ("ecc.errors.uncorrected.volatile.total", "[N/A]"),
        ("remapped_rows.pending", "No"),
        ("fabric.state", "Completed"),
        ("fabric.state", "N/A"),
        ("display_mode", "[Requested functionality has been deprecated]"),
    ],
)
def test_what_is_no_fault(column: str, value: str) -> None:
    text = f"index, name, memory.total [MiB], {column}\n0, NVIDIA H100, 81559 MiB, {value}\n"
    assert parse_gpus(text).cards[0].faults == ()


def test_table_with_mig_ecc_errors_and_processes() -> None:
    first, second = parse_gpus(TABLE).cards
    assert first.faults == (
        "2 uncorrected memory errors since the last reset: reset or replace it",
    )
    assert [(p.pid, p.name, p.memory_mib) for p in first.processes] == [(4711, "python3", 1990)]
    assert (first.mig, second.mig, second.memory_mib, second.processes) == (False, True, None, ())


def test_xml() -> None:
    (card,) = parse_gpus(XML).cards
    assert (card.name, card.memory_mib, card.memory_used_mib) == ("NVIDIA L40S", 46068, 900)
    assert card.pcie == (1, 4, 8, 16)
    assert card.throttled == ("hw_thermal_slowdown",)
    assert card.faults == ("a row of its memory could not be remapped: replace it",)
    assert card.processes[0].pid == 77


def test_xml_cut_off_keeps_whole_cards_and_says_so() -> None:
    cut = XML.replace("</nvidia_smi_log>", '<gpu id="0"><product_name>NV')
    listing = parse_gpus(cut)
    assert len(listing.cards) == 1
    assert "1 cards of it can be read" in listing.warnings[0]
    with pytest.raises(CardsError, match="cut off or damaged"):
        parse_gpus(XML[:200])


def test_damaged_xml_keeps_the_numbers_of_the_cards_that_are_whole() -> None:
    card = XML[XML.index("<gpu id") : XML.index("</gpu>") + len("</gpu>")]
    listing = parse_gpus(XML.replace(card, card.replace("</uuid>", "") + card))
    assert [one.index for one in listing.cards] == [1]
    assert "damaged" in listing.warnings[0]
    with pytest.raises(CardsError, match="cut off or damaged"):
        parse_gpus(XML.replace(card, card.replace("</uuid>", "")))


@pytest.mark.parametrize(
    "text", ['{"card0": ' + "[" * 5000, '{"card0": ' + "1" * 5000, "{", '{"card0": [1]} x']
)
def test_damaged_json_of_rocm_smi_is_a_sentence(text: str) -> None:
    with pytest.raises(CardsError, match="cut off or damaged"):
        parse_gpus(text)


def test_list_with_slices() -> None:
    text = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-b)\n"
        "  MIG 1g.10gb     Device  1: (UUID: MIG-c)\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-d)\n"
    )
    first, second = parse_gpus(text).cards
    assert (first.mig, first.slices) == (True, ("3g.40gb", "1g.10gb"))
    assert second.mig is None


def test_rocm_json_and_csv() -> None:
    text = (
        'WARNING\n{"card0": {"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": '
        '"206141652992", "VRAM Total Used Memory (B)": "297811968", "Unique ID": "0x1"}, '
        '"system": {"Driver version": "6.12"}}'
    ).removeprefix("WARNING\n")
    (card,) = parse_gpus(text).cards
    assert (card.vendor, card.name, card.memory_mib) == ("amd", "AMD Instinct MI300X", 196592)
    rows = (
        "device,Card Series,VRAM Total Memory (B),VRAM Total Used Memory (B)\n"
        "card0,AMD Instinct MI250X,68702699520,10960896\n"
        "card1,AMD Instinct MI250X,68702699520,10960896\n"
    )
    cards = parse_gpus(rows).cards
    assert [(c.index, c.memory_mib, c.memory_used_mib) for c in cards] == [
        (0, 65520, 10),
        (1, 65520, 10),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("   \n\n", "is empty"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "reload the modules"),
        ("No devices were found\n", "finds no card"),
        ("bash: nvidia-smi: command not found\n", "is not installed"),
        (
            "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error\n",
            "the card at 0000:07:00.0 does not answer",
        ),
        ("index, name, memory.total [MiB]\n", "a header and no card"),
        ("gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-a, 1, x, 2 MiB\n", "processes"),
        ("hello world\n", "no list of cards"),
        (gpus(2) + gpus(2), "two header lines"),
        (gpus(2) + "\n".join(gpus(2).splitlines()[1:]), "one index twice"),
        (matrix(uniform(2, "NV4")), "matrix of links"),
        ("NVIDIA-SMI version  : 595.71.05\nNVML version : 595.71\n", "no list of cards"),
        ('{"card0": {"Card Series": "AMD', "cut off or damaged"),
    ],
)
def test_what_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(CardsError) as refused:
        parse_gpus(text)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cut_row_is_left_out_and_said() -> None:
    listing = parse_gpus(gpus(3)[:-30])
    assert [c.index for c in listing.cards] == [0, 1]
    assert "cut off" in listing.warnings[0]


def test_a_lost_card_beside_good_ones_is_said() -> None:
    text = "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error\n" + gpus(2)
    listing = parse_gpus(text)
    assert len(listing.cards) == 2
    assert "0000:07:00.0" in listing.warnings[0]


def test_processes_find_their_card_by_bus_uuid_or_index() -> None:
    cards = parse_gpus(gpus(3)).cards
    apps = parse_compute_apps(
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-00000001, 7, vllm, 500 MiB\n"
    ) + parse_compute_apps(
        "gpu_bus_id, pid, process_name, used_gpu_memory [MiB]\n00000000:12:00.0, 8, x, [N/A]\n"
    )
    held = attach(cards, apps)
    assert [[p.pid for p in c.processes] for c in held] == [[], [7], [8]]
    assert held[2].processes[0].memory_mib is None


def test_masked_uuids_tie_no_process_to_every_card() -> None:
    cards = (Card(0, "x", uuid="GPU-0", bus_id="0:1:0.0"), Card(1, "x", uuid="GPU-0"))
    apps = parse_compute_apps("GPU-0, 4711, python, 900\n")
    assert all(c.processes == () for c in attach(cards, apps))


def test_no_processes_and_no_list_of_processes() -> None:
    assert parse_compute_apps("gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n") == ()
    assert parse_compute_apps("") == ()
    with pytest.raises(CardsError, match="no list of processes"):
        parse_compute_apps("something else entirely\n")


def test_kernel_log() -> None:
    text = (
        "[  12.1] NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus.\n"
        "[  13.0] NVRM: The NVIDIA GPU 0000:b3:00.0\n"
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "               NVRM: fallen off the bus and is not responding to commands.\n"
        "[  14.0] usb 1-1: new device\n"
    )
    first, second = parse_kernel_log(text)
    assert (first.bus_id, first.xid) == ("0000:44:00", 79)
    assert (second.bus_id, second.xid) == ("0000:b3:00.0", None)


def test_nvlink_status() -> None:
    text = "GPU 0: X (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\nGPU 1: X (UUID: GPU-b)\n"
    assert parse_nvlink_status(text) == {0: "active", 1: "unsupported"}


def test_no_complaint_about_a_good_text() -> None:
    assert complaint(gpus(1)) is None
