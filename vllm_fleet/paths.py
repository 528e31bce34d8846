"""Where things are on a host. One place, so that code, templates and docs agree."""

from __future__ import annotations

OPT = "/opt/vllm"
RELEASES = f"{OPT}/releases"  # <id>/: a venv, its lock and stamp
PYTHON = f"{OPT}/python"  # <version>-<sha256>/: from python_archive
TOOLS = f"{OPT}/tools"  # <id>/: small venv of ours; `current` links to the one in use
MODELS = f"{OPT}/models"  # <name>/<revision>/
LIB = f"{OPT}/lib"  # our scripts: gate, warm-up, drain, release, weights, state
ETC = "/etc/vllm"  # <instance>.env, <instance>.sh
HUB_TOKEN = f"{ETC}/hub.token"  # of the model hub, root alone
HUGGINGFACE_TOKEN = f"{ETC}/huggingface.token"  # of Hugging Face, root alone
RUN = "/run/vllm"  # <instance>/ready
STATE = "/var/lib/vllm"  # <instance>/: caches, running checksum, audit; manifest.json
MANIFEST = f"{STATE}/manifest.json"  # what we put on this host, by path
TEXTFILE = f"{STATE}/metrics"  # *.prom, read by the node exporter
USER = "vllm"
MARK = "Managed by vllm-fleet"  # first comment of every file of ours
