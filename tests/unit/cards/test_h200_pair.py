"""Two H200s of one host behind NVSwitch, in every text of theirs (driver 580.159.04).

As they were printed, but for UUIDs and serial numbers; of the XML what is read, and around it.
The codes for a terminal stand after the tab of the header, and end after its last name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cards.test_cli import run

TABLE = """\
Mon Nov 30 03:19:27 2026       
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H200                    On  |   00000000:00:06.0 Off |                    0 |
| N/A   33C    P0             97W /  700W |       0MiB / 143771MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H200                    On  |   00000000:00:07.0 Off |                    0 |
| N/A   36C    P0            108W /  700W |       0MiB / 143771MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""  # noqa: W291

CSV = """\
index, name, uuid, memory.total [MiB], driver_version, compute_cap, mig.mode.current, pci.bus_id
0, NVIDIA H200, GPU-00000000-0000-0000-0000-00000000000a, 143771 MiB, 580.159.04, 9.0, Disabled, 00000000:00:06.0
1, NVIDIA H200, GPU-00000000-0000-0000-0000-00000000000b, 143771 MiB, 580.159.04, 9.0, Disabled, 00000000:00:07.0
"""  # noqa: E501

XML_CARD = """\
	<gpu id="00000000:00:0{bus}.0">
		<product_name>NVIDIA H200</product_name>
		<product_brand>NVIDIA</product_brand>
		<product_architecture>Hopper</product_architecture>
		<display_mode>Requested functionality has been deprecated</display_mode>
		<display_attached>Yes</display_attached>
		<display_active>Disabled</display_active>
		<persistence_mode>Enabled</persistence_mode>
		<addressing_mode>None</addressing_mode>
		<mig_mode>
			<current_mig>Disabled</current_mig>
			<pending_mig>Disabled</pending_mig>
		</mig_mode>
		<mig_devices>
			None
		</mig_devices>
		<serial>0000000000000</serial>
		<uuid>GPU-00000000-0000-0000-0000-00000000000{bus}</uuid>
		<minor_number>{minor}</minor_number>
		<gpu_recovery_action>None</gpu_recovery_action>
		<pci>
			<pci_bus_id>00000000:00:0{bus}.0</pci_bus_id>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>5</max_link_gen>
					<current_link_gen>5</current_link_gen>
					<device_current_link_gen>5</device_current_link_gen>
					<max_device_link_gen>5</max_device_link_gen>
					<max_host_link_gen>N/A</max_host_link_gen>
				</pcie_gen>
				<link_widths>
					<max_link_width>16x</max_link_width>
					<current_link_width>16x</current_link_width>
				</link_widths>
			</pci_gpu_link_info>
		</pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage>
			<total>143771 MiB</total>
			<reserved>616 MiB</reserved>
			<used>0 MiB</used>
			<free>143156 MiB</free>
		</fb_memory_usage>
		<ecc_mode>
			<current_ecc>Enabled</current_ecc>
			<pending_ecc>Enabled</pending_ecc>
		</ecc_mode>
		<processes>
		</processes>
	</gpu>
"""  # noqa: E501
XML = (
    '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
    "<nvidia_smi_log>\n\t<timestamp>Mon Nov 30 03:19:27 2026</timestamp>\n"
    "\t<driver_version>580.159.04</driver_version>\n\t<cuda_version>13.0</cuda_version>\n"
    "\t<attached_gpus>2</attached_gpus>\n"
    + "".join(XML_CARD.format(bus=6 + minor, minor=minor) for minor in range(2))
    + "</nvidia_smi_log>\n"
)

TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \t0-31\t0\t\tN/A\n"
    "\nLegend:\n\n"
    "  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes"
    " (e.g., QPI/UPI)\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


@pytest.mark.parametrize("listing", [TABLE, CSV, XML], ids=["table", "csv", "xml"])
def test_they_are_one_group_without_a_complaint(tmp_path: Path, listing: str) -> None:
    code, output = run(
        tmp_path, ["--gpus", "@g.txt", "--topo", "@t.txt", "--json"], g=listing, t=TOPO
    )
    assert code == 0
    assert json.loads(output) == {
        "groups": [
            {
                "gpus": [0, 1],
                "name": "NVIDIA H200",
                "memory_mib": 143771,
                "link": "NV18",
                "vendor": "nvidia",
            }
        ],
        "left_out": [],
        "warnings": [],
    }
