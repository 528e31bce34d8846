"""Broken files of group_vars, each with one mistake, and exactly what the operator reads."""

from __future__ import annotations

import pytest

from tests.unit.spec.conftest import GOOD, Project

VERSION = 'must be a version such as "0.21.0"'
PORT = "must be an integer from 1024 to 65535"
SECRET = (
    "a secret never stands in group_vars; put a hub's token in a file and name that file in "
    "hub.token_file"
)


def good(*changes: tuple[str, str], then: str = "") -> str:
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text + then


def model(lines: str) -> str:
    """The good file with further lines of the model, from line 5 on."""
    return good(("Air\n", "Air\n" + "".join(f"    {line}\n" for line in lines.splitlines())))


# id: (file, its text, complaints)
TABLE: dict[str, tuple[str, str, list[str]]] = {
    "bracket left open": (
        "gpu",
        "device: [cuda\n",
        ['gpu.yml:2:1: not YAML: a "," or the closing "]" is missing before this'],
    ),
    "rollout: deadlines out of order": (
        "gpu",
        "rollout:\n  minimum_healthy_seconds: 60\n  healthy_deadline_seconds: 60\n",
        [
            "gpu.yml:3:29: rollout.healthy_deadline_seconds: minimum_healthy_seconds (60) must be "
            "less than healthy_deadline_seconds (60)"
        ],
    ),
    "rollout: a deadline over the default of the next": (
        "gpu",
        "rollout: {healthy_deadline_seconds: 9000}\n",
        [
            "gpu.yml:1:37: rollout.healthy_deadline_seconds: healthy_deadline_seconds (9000) must "
            "be less than progress_deadline_seconds (7200)"
        ],
    ),
    "rollout: a percentage over all": (
        "gpu",
        'rollout: {wave: "200%"}\n',
        ['gpu.yml:1:17: rollout.wave: must be a number from 1 on, or a percentage such as "25%"'],
    ),
    "tab": (
        "gateway",
        "gateway:\n\tlisten: 80\n",
        ["gateway.yml:2:1: not YAML: a tab; indent with spaces"],
    ),
    "at sign": (
        "gpu",
        "vllm_exclude: [@local]\n",
        ['gpu.yml:1:16: not YAML: text that starts with "@" must be in quotes, as in "@local"'],
    ),
    "second colon": (
        "gpu",
        "python: a: b\n",
        ['gpu.yml:1:10: not YAML: a second ":" in one line; put the text in quotes'],
    ),
    "indentation": (
        "all",
        "proxy:\n  http: a\n https: b\n",
        ["all.yml:3:2: not YAML: is indented unlike the lines above it"],
    ),
    "python without a checksum": (
        "gpu",
        "python_archive: {source: files/py.tar.gz, sha256: 12ab, version: 3.12}\n",
        [
            "gpu.yml:1:26: python_archive.source: must be a URL, or an absolute path such as "
            '"/srv/cpython-3.12-install_only.tar.gz"',
            "gpu.yml:1:51: python_archive.sha256: must be a sha256: 64 hex digits, lower case",
            'gpu.yml:1:66: python_archive.version: must be a version such as "3.12"; '
            'put it in quotes: "3.12"',
        ],
    ),
    "two documents": (
        "gpu",
        "device: cuda\n---\ndevice: cpu\n",
        ['gpu.yml:2:1: not YAML: a second document ("---")'],
    ),
    "control character": (
        "gpu",
        "python: a\x07\n",
        ["gpu.yml:1:10: not YAML: a control character"],
    ),
    "list at the top": (
        "gpu",
        "- device: cuda\n",
        ['gpu.yml:1:1: must be settings, one "key: value" a line, not a list'],
    ),
    "duplicate key": (
        "gpu",
        "device: cuda\nstart_seconds: 5\ndevice: cuda\n",
        ["gpu.yml:3:1: device: stands twice, in lines 1 and 3"],
    ),
    "duplicate key below": (
        "prod",
        model("repo: Qwen/Qwen3-8B"),
        ["prod.yml:5:5: models.glm.repo: stands twice, in lines 4 and 5"],
    ),
    "key that is a number": (
        "prod",
        model("vllm_args: {1: a}"),
        ['prod.yml:5:17: models.glm.vllm_args.1: YAML reads this key as a number; write "1":'],
    ),
    "nested without end": (
        "gpu",
        "python: " + "[" * 900 + "]" * 900 + "\n",
        ["gpu.yml:1:1: is nested too deeply"],
    ),
    "merged keys": (
        "gpu",
        "<<: [{device: cuda}, {start_seconds: 0}]\n",
        ["gpu.yml:1:38: start_seconds: must be a positive integer"],
    ),
    "tag": (
        "gpu",
        "python: !secret x\n",
        ['gpu.yml:1:9: python: the tag "!secret" means nothing here; take it away'],
    ),
    "alias in itself": (
        "gpu",
        "vllm_exclude: &a [*a]\n",
        ["gpu.yml:1:15: vllm_exclude[0]: an alias that holds itself"],
    ),
    "version read as a number": (
        "prod",
        good(('"0.21.0"', "0.20")),
        [
            f"prod.yml:1:15: vllm_version: {VERSION}; YAML reads 0.20 as the number 0.2, "
            'write "0.20"'
        ],
    ),
    "version with an underscore": (
        "prod",
        good(('"0.21.0"', "1_0")),
        [f"prod.yml:1:15: vllm_version: {VERSION}"],
    ),
    "date where text is wanted": (
        "gpu",
        "vllm_exclude: [2026-01-01]\n",
        ["gpu.yml:1:16: vllm_exclude[0]: YAML reads 2026-01-01 as a date; put it in quotes"],
    ),
    "on where text is wanted": (
        "gpu",
        "python: on\n",
        [
            "gpu.yml:1:9: python: must be a non-empty line of text; YAML reads on as true, "
            'write "on"'
        ],
    ),
    "yes among options": (
        "prod",
        model("vllm_args: {async-scheduling: yes}"),
        [
            "prod.yml:5:35: models.glm.vllm_args.async-scheduling: YAML reads yes as true; "
            "write true, or put it in quotes"
        ],
    ),
    "number of the environment": (
        "prod",
        model("env: {OMP_NUM_THREADS: 8}"),
        [
            "prod.yml:5:28: models.glm.env.OMP_NUM_THREADS: must be one line of text; "
            'put it in quotes: "8"'
        ],
    ),
    "minutes and seconds": (
        "gpu",
        "start_seconds: 1:30\n",
        [
            "gpu.yml:1:16: start_seconds: YAML reads 1:30 as the number 90; write 90, "
            "or put it in quotes if it is text"
        ],
    ),
    "octal": (
        "gpu",
        "start_seconds: 0600\n",
        [
            "gpu.yml:1:16: start_seconds: YAML reads 0600 as the number 384; write 384, "
            "or put it in quotes if it is text"
        ],
    ),
    "port with a leading zero": (
        "prod",
        good(("8001", "08001")),
        [f"prod.yml:10:11: instances[0].port: {PORT}; a leading zero makes it text: 8001"],
    ),
    "port with a fraction": (
        "prod",
        good(("8001", "8001.0")),
        [f"prod.yml:10:11: instances[0].port: {PORT}; write 8001"],
    ),
    "port in quotes": (
        "prod",
        good(("8001", '"8001"')),
        [f"prod.yml:10:11: instances[0].port: {PORT}; take the quotes away: 8001"],
    ),
    "port below 1024": (
        "prod",
        good(("8001", "80")),
        [f"prod.yml:10:11: instances[0].port: {PORT}"],
    ),
    "port missing": (
        "prod",
        good(("    port: 8001\n", "")),
        [f"prod.yml:6:5: instances[0].port: is missing; it {PORT}"],
    ),
    "null": (
        "gpu",
        "device:\n",
        ['gpu.yml:1:8: device: must be "cuda", "rocm" or "cpu"; take the key away for its default'],
    ),
    "not one of the words": (
        "gpu",
        "device: gpu\n",
        ['gpu.yml:1:9: device: must be "cuda", "rocm" or "cpu"'],
    ),
    "length in words": (
        "prod",
        model("max_model_len: long"),
        ['prod.yml:5:20: models.glm.max_model_len: must be a positive integer or "auto"'],
    ),
    "one host, no list": (
        "prod",
        good(("[gpu-01, gpu-02]", "gpu-01")),
        ["prod.yml:7:12: instances[0].hosts: must be a list"],
    ),
    "no host": (
        "prod",
        good(("[gpu-01, gpu-02]", "[]")),
        ["prod.yml:7:12: instances[0].hosts: must not be empty"],
    ),
    "newline in a path": (
        "gpu",
        'package_cache: "/var/\\ncache"\n',
        ["gpu.yml:1:16: package_cache: must be an absolute path in one line"],
    ),
    "NUL in a line": (
        "gpu",
        'python: "python3\\0"\n',
        ["gpu.yml:1:9: python: must be a non-empty line of text"],
    ),
    "NUL in an option": (
        "prod",
        model('vllm_args: {chat-template: "a\\0"}'),
        ["prod.yml:5:32: models.glm.vllm_args.chat-template: must not hold a NUL character"],
    ),
    "revision that leaves its directory": (
        "prod",
        model("revision: ../../etc"),
        ["prod.yml:5:15: models.glm.revision: must be a tag, branch or commit"],
    ),
    "misspelt key": (
        "prod",
        model("max_modle_len: 5"),
        ['prod.yml:5:5: models.glm.max_modle_len: no such setting; did you mean "max_model_len"?'],
    ),
    "key of the inventory": (
        "gpu",
        "ssh_user: deploy\n",
        [
            "gpu.yml:1:1: ssh_user: no such setting; how to reach a host stands in the inventory, "
            'as in ("gpu-01", {"ssh_user": ...})'
        ],
    ),
    "key of another place": (
        "gpu",
        "max_model_len: 5\n",
        [
            "gpu.yml:1:1: max_model_len: no such setting here; "
            "it stands in models.<name>.max_model_len"
        ],
    ),
    "option of vLLM beside the settings": (
        "prod",
        model("enforce-eager: true"),
        [
            "prod.yml:5:5: models.glm.enforce-eager: no such setting; "
            "options of `vllm serve` stand in vllm_args"
        ],
    ),
    "token in group_vars": (
        "gpu",
        "hub: {token: hf_abcdefghijklmnopqrst}\n",
        [
            "gpu.yml:1:7: hub.token: a secret never stands in group_vars; "
            "put it in a file and name that file in hub.token_file"
        ],
    ),
    "token in the environment": (
        "prod",
        model("env: {HF_TOKEN: hf_abcdefghijklmnopqrst}"),
        [f"prod.yml:5:11: models.glm.env.HF_TOKEN: {SECRET}"],
    ),
    "card twice": (
        "prod",
        good(("[0, 1]", "[1, 1]")),
        ["prod.yml:9:12: instances[0].cards: names one card twice"],
    ),
    "one card of two instances": (
        "prod",
        good(then="  - {name: b, hosts: [gpu-02], model: glm, cards: [1, 2], port: 8002}\n"),
        [
            "prod.yml:11:52: instances[1].cards[0]: card 1 of gpu-02 is taken by "
            "a (group_vars/prod.yml:9)"
        ],
    ),
    "one port of two instances": (
        "prod",
        good(then="  - {name: b, hosts: [gpu-01, gpu-02], model: glm, cards: [2], port: 8001}\n"),
        [
            "prod.yml:11:70: instances[1].port: port 8001 of gpu-01, gpu-02 is taken by "
            "a (group_vars/prod.yml:10)"
        ],
    ),
    "an instance named like a folder of ours": (
        "prod",
        good(("name: a", "name: metrics")),
        [
            "prod.yml:6:11: instances[0].name: is the name of a folder or file of ours in "
            "/var/lib/vllm; choose another"
        ],
    ),
    "the name of the fabric's file": (
        "prod",
        good(("name: a", "name: fabric")),
        [
            "prod.yml:6:11: instances[0].name: is the name of a file of ours in /etc/vllm "
            "(/etc/vllm/fabric.env); choose another"
        ],
    ),
    "one name of two instances": (
        "prod",
        good(then="  - {name: a, hosts: [gpu-01], model: glm, cards: [2], port: 8002}\n"),
        [
            "prod.yml:11:12: instances[1].name: stands twice on gpu-01: "
            "group_vars/prod.yml:6 has it too"
        ],
    ),
    "port of the node exporter": (
        "prod",
        good(("8001", "9100")),
        [
            "prod.yml:10:11: instances[0].port: port 9100 of gpu-01, gpu-02 is taken by "
            "the node exporter"
        ],
    ),
    "gateway on the port of Prometheus": (
        "gateway",
        "gateway: {listen: 9090}\n",
        ["gateway.yml:1:19: gateway.listen: port 9090 of gw-01 is taken by Prometheus"],
    ),
    "unknown model": (
        "prod",
        good(("model: glm", "model: gml")),
        [
            "prod.yml:3:3: models.glm: no instance serves this model; add one to `instances`, "
            "or take it away",
            'prod.yml:8:12: instances[0].model: "gml" is no model of gpu-01, gpu-02; known: glm',
        ],
    ),
    "unknown host": (
        "prod",
        good(("gpu-02", "gpu-20")),
        [
            'prod.yml:7:21: instances[0].hosts[1]: "gpu-20" is no host of inventory/prod.py; '
            'did you mean "gpu-02"?'
        ],
    ),
    "host of another group": (
        "prod",
        good(("gpu-02", "gw-01")),
        ['prod.yml:7:21: instances[0].hosts[1]: "gw-01" is not in group gpu of inventory/prod.py'],
    ),
    "host twice": (
        "prod",
        good(("gpu-02", "gpu-01")),
        ["prod.yml:7:21: instances[0].hosts[1]: names gpu-01 twice"],
    ),
    "model nobody serves": (
        "prod",
        good(("instances:", "  qwen: {repo: Qwen/Qwen3-8B}\ninstances:")),
        [
            "prod.yml:5:3: models.qwen: no instance serves this model; add one to `instances`, "
            "or take it away"
        ],
    ),
    "alias of its own name": (
        "prod",
        model("aliases: [g, glm]"),
        ['prod.yml:5:18: models.glm.aliases[1]: "glm" is a name of this model already'],
    ),
    "code that no commit pins": (
        "prod",
        model("trust_remote_code: true"),
        [
            "prod.yml:5:24: models.glm.trust_remote_code: runs code of the repository, which a "
            "tag or branch does not pin; write a commit (40 hex digits) as revision"
        ],
    ),
    "no release": (
        "prod",
        good(('vllm_version: "0.21.0"\n', "")),
        [
            "prod.yml:5:5: instances[0].vllm_version: no release for gpu-01, gpu-02; "
            "set vllm_version in all.yml, here or at the model"
        ],
    ),
    "no cards": (
        "prod",
        good(("    cards: [0, 1]\n", "")),
        [
            "prod.yml:6:5: instances[0].cards: is missing or empty; gpu-01, gpu-02: computes on "
            "cuda, so name the cards"
        ],
    ),
    "cards on the CPU": (
        "gpu",
        "device: cpu\n",
        [
            "prod.yml:9:12: instances[0].cards: gpu-01, gpu-02: computes on the CPU "
            "(`device: cpu`); take the cards away"
        ],
    ),
    "directory as a repository": (
        "prod",
        good(("ZhipuAI/GLM-4.5-Air", "/data/glm")),
        [
            "prod.yml:4:11: models.glm.repo: is a directory; say so with `source: path`, "
            "or name a repository"
        ],
    ),
    "relative directory": (
        "prod",
        good(("ZhipuAI/GLM-4.5-Air", "models/glm\n    source: path")),
        [
            "prod.yml:4:11: models.glm.repo: must be an absolute path on the hosts, "
            "as `source` is path"
        ],
    ),
    "option that is ours": (
        "prod",
        model("vllm_args: {served_model_name: x, tensor-parallel-size: 2}"),
        [
            "prod.yml:5:17: models.glm.vllm_args.served_model_name: is set by us; the name is the "
            "model's key in `models`, further ones its `aliases`"
        ],
    ),
    "option in both spellings": (
        "prod",
        model("vllm_args: {max-num-seqs: 8, max_num_seqs: 9}"),
        [
            "prod.yml:5:34: models.glm.vllm_args.max_num_seqs: is the same option as "
            '"max-num-seqs"; write it once'
        ],
    ),
    "option with dashes": (
        "prod",
        model("vllm_args: {--max-num-seqs: 8}"),
        [
            "prod.yml:5:17: models.glm.vllm_args.--max-num-seqs: write the option without "
            'leading dashes: "max-num-seqs"'
        ],
    ),
    "environment that is ours": (
        "prod",
        model('env: {CUDA_VISIBLE_DEVICES: "0"}'),
        [
            "prod.yml:5:11: models.glm.env.CUDA_VISIBLE_DEVICES: is set by us; "
            "it follows from `cards`"
        ],
    ),
    "lock that does not exist": (
        "gpu",
        "vllm_lock: locks/{version}.txt\n",
        [
            'gpu.yml:1:12: vllm_lock: "locks/0.21.0.txt" does not exist; '
            "`fleet lock 0.21.0` makes it"
        ],
    ),
}


def test_the_unbroken_files_are_good(project: Project) -> None:
    assert project.complaints() == []
    assert project.check().warnings == ()


@pytest.mark.parametrize("name", TABLE)
def test_broken_file(project: Project, name: str) -> None:
    file, text, wanted = TABLE[name]
    project.write(f"group_vars/{file}.yml", text)
    assert project.complaints() == [f"group_vars/{line}" for line in wanted]


def test_other_encoding(project: Project) -> None:
    (project.root / "group_vars/gpu.yml").write_bytes("python: \u00e9\n".encode("latin-1"))
    assert project.complaints() == ["group_vars/gpu.yml: is not UTF-8 text; save it as UTF-8"]


@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_file_that_does_not_exist(project: Project, device: str) -> None:
    project.write("group_vars/gpu.yml", f"device: {device}\nhub: {{token_file: secrets/t}}\n")
    project.write("group_vars/gateway.yml", "gateway: {tls: {certificate: a.pem, key: b.key}}\n")
    below = f"it is looked for below {project.root}"
    assert project.complaints() == [
        'group_vars/gateway.yml:1:30: gateway.tls.certificate: "a.pem" does not exist; ' + below,
        'group_vars/gateway.yml:1:42: gateway.tls.key: "b.key" does not exist; ' + below,
        'group_vars/gpu.yml:2:19: hub.token_file: "secrets/t" does not exist; ' + below,
    ]


def test_shared_address_of_the_gateways(project: Project) -> None:
    shared = "gateway: {{keepalived: {{address: {}, router_id: {}, password_file: {}}}}}\n"
    project.write("group_vars/gateway.yml", shared.format("10.0.0.100/24", 7, "p"))
    assert project.complaints() == [
        'group_vars/gateway.yml:1:77: gateway.keepalived.password_file: "p" does not exist; '
        f"it is looked for below {project.root}"
    ]
    project.write("p", "secret")
    assert project.complaints() == []
    project.write("group_vars/gateway.yml", shared.format("10.0.0.100", 256, "p"))
    where = "group_vars/gateway.yml:1:"
    assert project.complaints() == [
        f"{where}33: gateway.keepalived.address: must be an IP address with the length of its "
        'network, such as "10.0.0.100/24"',
        f"{where}56: gateway.keepalived.router_id: must be an integer from 1 to 255",
    ]
    project.write("group_vars/gateway.yml", "gateway: {admin_networks: [10.0.9.1/24]}\n")
    assert project.complaints() == [
        f"{where}28: gateway.admin_networks[0]: must be an IP address or a network such as "
        '"10.0.9.0/24"'
    ]


def test_every_mistake_of_every_file_in_one_go(project: Project) -> None:
    project.write("group_vars/all.yml", "start_seconds: 0\n")
    project.write("group_vars/gpu.yml", "start_seconds: -1\nbogus: 1\n")  # overrides it, and bad
    project.good(
        ("8001", "80"),
        ("model: glm", "model: gml"),
        ("Air\n", "Air\n    max_model_len: -5\n    env: {HOME: /x}\n"),
    )
    lines = project.complaints()
    assert [line.split(": ")[0:2] for line in lines] == [
        ["group_vars/all.yml:1:16", "start_seconds"],
        ["group_vars/gpu.yml:1:16", "start_seconds"],
        ["group_vars/gpu.yml:2:1", "bogus"],
        ["group_vars/prod.yml:3:3", "models.glm"],  # unserved
        ["group_vars/prod.yml:5:20", "models.glm.max_model_len"],
        ["group_vars/prod.yml:6:11", "models.glm.env.HOME"],
        ["group_vars/prod.yml:10:12", "instances[0].model"],
        ["group_vars/prod.yml:12:11", "instances[0].port"],
    ]


def test_no_secret_is_repeated(project: Project) -> None:
    secrets = ["hf_abcdefghijklmnopqrst", "20260101", "sk-abcdefghijklmnopqrst"]
    project.write(
        "group_vars/all.yml",
        f"hub: {{token: {secrets[0]}, token_file: {secrets[1]}}}\napi_key: {secrets[2]}\n"
        f"api_keys: {{file: {secrets[1]}}}\nproxy: {{http: [{secrets[0]}]}}\n",
    )
    lines = project.complaints()
    assert len(lines) == 5
    assert not [s for s in secrets for line in lines if s in line]


def test_a_complaint_is_one_line(project: Project) -> None:
    project.good(("[gpu-01, gpu-02]", '["gpu\\n-01"]'))
    (line,) = [line for line in project.complaints() if "hosts[0]" in line]
    assert "\n" not in line
    assert '"gpu\\n-01" is no host' in line
