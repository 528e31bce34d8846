"""Small wheels made up by tests, with what release.py looks at in vLLM."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    tag: str = "py3-none-any",
    body: str = "",
    need: str = "",
    build: str = "",
) -> str:
    """Write a wheel, as vLLM where its name begins so. Returns its sha256.

    ``build``: its build tag; each makes another file of the same version.
    """
    main = f"def main():\n    print('{version}')\n{body}"
    files = {
        "vllm/__init__.py": "",
        "vllm/cli.py": main,
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": "",
        "vllm/v1/__init__.py": "",
        "vllm/v1/engine/__init__.py": "",
        "vllm/v1/engine/core.py": "",
        "vllm/build.txt": build,
    }
    if not name.startswith("vllm"):
        files = {f"{name}.py": ""}
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in need.split(",") if one)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        + (f"Build: {build}\n" if build else "")
        + f"Tag: {tag}\n"
    )
    if name.startswith("vllm"):
        files[f"{info}/entry_points.txt"] = "[console_scripts]\nvllm = vllm.cli:main\n"
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    middle = f"-{build}" if build else ""
    path = folder / f"{name.replace('-', '_')}-{version}{middle}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(file), text)  # always of the same bytes
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.decode().rstrip('=')}"
