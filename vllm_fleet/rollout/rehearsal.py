"""Which instances of a host start alike, so that one rehearsal tells of all of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# What differs between instances of one host that are otherwise the same.
OF_ITS_OWN = (
    "FLEET_INSTANCE",
    "FLEET_CARDS",
    "FLEET_CARD_UUIDS",
    "FLEET_PORT",
    "FLEET_CHECKSUM",
    "CUDA_VISIBLE_DEVICES",
)


def as_rehearsed(name: str, files: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """What a rehearsal looks at, without what is the instance's own: its command, its environment.

    Two of one host with the same are rehearsed once. Whatever else differs, were it one letter,
    makes two.
    """
    texts = {file["path"].rpartition(".")[2]: file["content"] for file in files}
    command = texts.get("sh", "").partition("\nexec ")[2]
    lines = [
        re.sub(rf"/{re.escape(name)}(?=[/\"]|$)", "/*", line)
        for line in texts.get("env", "").splitlines()
        if line.partition("=")[0] not in OF_ITS_OWN and not line.startswith("#")
    ]
    return (re.sub(r"--port[ =]\d+", "--port *", command), *lines)
