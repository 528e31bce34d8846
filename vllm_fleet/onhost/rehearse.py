"""Try a command line of `vllm serve` on a release that is staged, without serving anything.

Runs as root with the host's own Python, standard library only. Reads one JSON object from
standard input: ``{"instance", "files": [{"path", "content", ...}]}``, the files of the version,
and prints ``result`` and ``{"ok", "why", "seconds"}`` as its last line.

The release's own Python parses the options with vLLM's parser and makes the engine's
configuration of them, as the user of the instance, in its environment and at low priority. What
needs a free card is not tried: the old version still serves on it.
"""

import json
import os
import pwd
import re
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List

Json = Dict[str, Any]

USER = "vllm"
SECONDS = 300
# The subcommand's own parser and check, as `vllm serve` uses them from 0.18 to 0.33; a release
# without them is not judged here, its start will tell.
CODE = r"""
import json, sys

try:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError as error:
    if getattr(error, "name", None) and not str(error.name).startswith("vllm"):
        raise
    raise SystemExit("REHEARSAL UNKNOWN %s" % error)

parser = FlexibleArgumentParser(prog="vllm")
serve = ServeSubcommand()
serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
args = parser.parse_args(json.loads(sys.argv[1]))
serve.validate(args)
if getattr(args, "model_tag", None) is not None:
    args.model = args.model_tag
AsyncEngineArgs.from_cli_args(args).create_engine_config()
print("REHEARSAL OK")
"""


def main() -> int:
    """Rehearse what stands on standard input."""
    order = json.load(sys.stdin)
    began = time.monotonic()
    why = rehearse(order["files"])
    found = {"ok": not why, "why": why, "seconds": round(time.monotonic() - began, 1)}
    print("result " + json.dumps(found), flush=True)
    return 0


def rehearse(files: List[Json]) -> str:
    """Why the release does not take the command line; "" where it does, or cannot tell."""
    texts = {os.path.splitext(file["path"])[1]: file["content"] for file in files}
    words = command(texts.get(".sh", ""))
    if not words:
        return "no command line in its start script"
    python = os.path.join(os.path.dirname(words[0]), "python")
    if not os.access(python, os.X_OK):
        return "%s is missing" % python
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        environment = {**variables(texts.get(".env", "")), "HOME": home, "TMPDIR": home}
        # Caches of the instance are its own; this leaves nothing in them.
        for key in list(environment):
            if key.endswith(("_CACHE", "_CACHE_DIR", "_CACHE_PATH", "_CACHE_HOME", "_CACHE_ROOT")):
                environment[key] = home
        drop: Dict[str, Any] = {}
        if os.getuid() == 0:
            user = pwd.getpwnam(USER)
            os.chown(home, user.pw_uid, user.pw_gid)
            drop = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        try:
            done = subprocess.run(
                ["nice", "-n", "10", python, "-c", CODE, json.dumps(words[1:])],
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                **drop,
            )
        except subprocess.TimeoutExpired:
            return ""  # a slow host is no wrong option; the start itself will tell
    text = bytes(done.stdout).decode("utf-8", "replace")
    if done.returncode == 0 or "REHEARSAL UNKNOWN" in text:
        return ""
    return cause(text)


def command(script: str) -> List[str]:
    """The words after `exec` in a start script, from vLLM's program on: a span has ours before."""
    joined = script.replace("\\\n", " ")
    match = re.search(r"^exec (.*)$", joined, re.MULTILINE)
    words = shlex.split(match.group(1)) if match else []
    starts = [place for place, word in enumerate(words) if word.endswith("/bin/vllm")]
    return words[starts[0] :] if starts else words


def variables(text: str) -> Dict[str, str]:
    """An environment file as systemd reads it: each value in double quotes, with escapes."""
    found = {}
    for key, value in re.findall(r'^([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"$', text, re.M | re.S):
        found[key] = re.sub(r"\\(.)", r"\1", value)
    return found


def cause(text: str) -> str:
    """What is wrong in one line: argparse's own, else an exception and what stands below it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        match = re.match(r"vllm(?: serve)?: error: (.*)", line)
        if match:
            return match.group(1)[:500]
    for place in range(len(lines) - 1, -1, -1):
        if re.match(r"[\w.]*(Error|Exception)\b", lines[place]):
            return " ".join(lines[place : place + 3])[:500]
    return lines[-1][:500] if lines else "it ended without a word"


if __name__ == "__main__":
    sys.exit(main())
