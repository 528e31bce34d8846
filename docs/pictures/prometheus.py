"""Take a picture of a graph of Prometheus: docs/pictures/prometheus.png.

    python -m docs.pictures.prometheus http://HOST:9090 [MINUTES]

From a fleet that is being watched, such as that of tests/integration/test_monitored.py during its
roll: tokens by instance, instances by vLLM version, and the first token's time, over some minutes.
"""

from __future__ import annotations

import sys
import time
import urllib.parse
from pathlib import Path

from tests.integration.browser import Browser

PICTURE = Path(__file__).with_name("prometheus.png")
QUERIES = (
    "sum by (host, instance) (rate(vllm:generation_tokens_total[1m]))",
    "count by (vllm_version) (vllm_fleet_instance_info)",
    "max by (host, instance) (vllm_fleet_gateway_instance_ready)",
)


def main() -> None:
    """Open its page, wait until it has drawn, look."""
    address, minutes = sys.argv[1].rstrip("/"), (sys.argv[2:] or ["10"])[0]
    panels = {}
    for number, query in enumerate(QUERIES):
        panels |= {
            f"g{number}.expr": query,
            f"g{number}.tab": "0",
            f"g{number}.stacked": "0",
            f"g{number}.range_input": f"{minutes}m",
        }
    with Browser() as browser:
        browser.size(1100, 2450)  # all of it, so that its bar stays on top
        browser.call("Page.navigate", url=f"{address}/graph?{urllib.parse.urlencode(panels)}")
        browser.wait("document.querySelectorAll('.graph_container svg, canvas').length >= 3")
        time.sleep(5)
        browser.picture(PICTURE, whole=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
