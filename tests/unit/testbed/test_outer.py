"""Discovery of the outer machine, over texts of machines of several kinds."""

from __future__ import annotations

import ipaddress

import pytest

from tests.testbed import outer
from tests.testbed.outer import Net, Release

DEBIAN_12 = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION_CODENAME=bookworm
ID=debian
"""
UBUNTU_24 = """\
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
"""


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (DEBIAN_12, Release("debian", "bookworm", True)),
        (UBUNTU_24, Release("ubuntu", "noble", True)),
        (UBUNTU_24.replace("24.04", "22.04").replace("noble", "jammy"),
         Release("ubuntu", "jammy", True)),
        (UBUNTU_24.replace("24.04", "20.04").replace("noble", "focal"),
         Release("debian", "bookworm", False)),
        (DEBIAN_12.replace('"12"', '"11"').replace("bookworm", "bullseye"),
         Release("debian", "bookworm", False)),
        ("ID=debian\nVERSION_CODENAME=forky\n", Release("debian", "bookworm", False)),
        ('ID=linuxmint\nVERSION_ID="22"\nUBUNTU_CODENAME=noble\n',
         Release("debian", "bookworm", False)),
        ("ID=fedora\nVERSION_ID=42\n", Release("debian", "bookworm", False)),
    ],
)  # fmt: skip
def test_hosts_get_the_own_release_where_supported(text: str, release: Release) -> None:
    assert outer.host_release(text) == release


DEBIAN_SOURCES = """\
Types: deb deb-src
# a comment inside
URIs: http://deb.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main non-free-firmware
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.example/off
Suites: bookworm
Components: main
Enabled: no
"""
UBUNTU_SOURCES = """\
Types: deb
URIs: http://archive.example/ubuntu/
Suites: noble noble-updates noble-backports
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg

## Security
Types: deb
URIs: http://security.example/ubuntu/
Suites: noble-security
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""
DOCKER_LIST = (
    "deb [arch=amd64 signed-by=/etc/apt/keyrings/docker.asc] "
    "https://docker.example/ubuntu noble stable\n"
)
VENDOR_LIST = "deb [signed-by=/usr/share/keyrings/vendor.gpg] https://vendor.example noble main\n"
OLD_LIST = """\
# deb cdrom:[Debian 12]/ bookworm main
deb cdrom:[Debian 12]/ bookworm main
deb http://deb.example/debian/ bookworm main contrib  # here
deb-src http://deb.example/debian/ bookworm main
deb [ trusted=yes ] http://deb.example/debian/ bookworm-updates main
"""
KEY = """\
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBF
 -----END PGP PUBLIC KEY BLOCK-----
"""

BOOKWORM = Release("debian", "bookworm", True)
NOBLE = Release("ubuntu", "noble", True)


def lines(sources: list[outer.Source]) -> list[str]:
    return [line for source in sources for line in source.lines()]


def test_debian_sources() -> None:
    found = outer.official(outer.parse_sources(DEBIAN_SOURCES, deb822=True), BOOKWORM)
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    assert lines(found) == [
        f"deb {signed} http://deb.example/debian bookworm main non-free-firmware",
        f"deb {signed} http://deb.example/debian bookworm-updates main non-free-firmware",
        f"deb {signed} http://deb.example/debian-security bookworm-security main",
    ]
    assert outer.source_files(found) == ["/usr/share/keyrings/debian-archive-keyring.gpg"]


def test_ubuntu_sources_without_other_vendors() -> None:
    sources = outer.parse_sources(UBUNTU_SOURCES, deb822=True)
    sources += outer.parse_sources(DOCKER_LIST + VENDOR_LIST, deb822=False)
    found = outer.official(sources, NOBLE)
    assert [line.split()[2:4] for line in lines(found)] == [
        ["http://archive.example/ubuntu/", "noble"],
        ["http://archive.example/ubuntu/", "noble-updates"],
        ["http://security.example/ubuntu/", "noble-security"],
    ]
    assert all(line.endswith("main universe restricted multiverse") for line in lines(found))


def test_one_line_sources() -> None:
    found = outer.official(outer.parse_sources(OLD_LIST, deb822=False), BOOKWORM)
    assert lines(found) == [
        "deb http://deb.example/debian/ bookworm main contrib",
        "deb [trusted=yes] http://deb.example/debian/ bookworm-updates main",
    ]


def test_an_inline_key_is_kept_as_a_file_would_hold_it() -> None:
    (source,) = outer.parse_sources(KEY, deb822=True)
    assert source.key is not None
    assert source.key.strip().splitlines()[1:3] == ["", "mQINBF"]
    assert source.lines("/k.asc") == [
        "deb [signed-by=/k.asc] http://mirror.example/debian bookworm main"
    ]


def test_sources_of_another_release_are_none() -> None:
    assert outer.official(outer.parse_sources(UBUNTU_SOURCES, deb822=True), BOOKWORM) == []


def test_mirror_lists_are_files_that_a_host_needs() -> None:
    cloud = DEBIAN_SOURCES.replace("http://deb.example/debian\n",
                                   "mirror+file:///etc/apt/mirrors/debian.list\n")  # fmt: skip
    found = outer.source_files(outer.parse_sources(cloud, deb822=True))
    assert found == [
        "/etc/apt/mirrors/debian.list",
        "/usr/share/keyrings/debian-archive-keyring.gpg",
    ]


APT_DUMP = """\
APT::Architecture "amd64";
Dir::Cache::pkgcache "";
DPkg::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb || true";
APT::Keep-Downloaded-Packages "false";
Acquire "";
Acquire::GzipIndexes "true";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3128";
Acquire::http::Proxy::mirror.example "DIRECT";
Acquire::https::CaInfo "/etc/ssl/own.pem";
Acquire::http::Proxy-Auto-Detect "/usr/local/bin/detect";
Acquire::Retries "3";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
"""


def test_settings_for_reaching_mirrors_are_kept_and_no_others() -> None:
    settings = outer.apt_settings(APT_DUMP)
    assert settings == [
        'Acquire::Check-Valid-Until "false";',
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::http::Proxy::mirror.example "DIRECT";',
        'Acquire::https::CaInfo "/etc/ssl/own.pem";',
        'Acquire::http::Proxy-Auto-Detect "/usr/local/bin/detect";',
        'Acquire::Retries "3";',
    ]
    assert outer.settings_files(settings) == ["/etc/ssl/own.pem", "/usr/local/bin/detect"]


def test_a_proxy_of_the_environment_is_added_once() -> None:
    environment = {"http_proxy": "http://env:1", "https_proxy": "http://env:2"}
    settings = outer.apt_settings(APT_DUMP, environment)
    assert 'Acquire::https::Proxy "http://env:2";' in settings
    assert not any("env:1" in line for line in settings)


DOCKER_ROUTES = """\
default via 10.0.2.2 dev ens3 proto dhcp src 10.0.2.15 metric 100
default via 192.168.1.1 dev wlan0 proto dhcp metric 600
10.0.2.0/24 dev ens3 proto kernel scope link src 10.0.2.15 metric 100
172.17.0.0/16 dev docker0 proto kernel scope link src 172.17.0.1 linkdown
10.77.0.0/16 dev vpn0 scope link
local 10.0.2.15 dev ens3 table local proto kernel scope host src 10.0.2.15
broadcast 10.0.2.255 dev ens3 table local proto kernel scope link src 10.0.2.15
default via 10.9.9.9 dev vpn0 table 52
fe80::/64 dev ens3 proto kernel metric 256
"""


def test_taken_networks_and_the_next_free_one() -> None:
    taken = outer.taken_networks(DOCKER_ROUTES, "nameserver 10.78.0.53\n")
    assert ipaddress.IPv4Network("172.17.0.0/16") in taken
    assert ipaddress.IPv4Network("10.0.2.15/32") in taken
    assert outer.free_net(taken) == Net(79)
    assert outer.free_net([]) == Net(77)


def test_a_vpn_that_takes_half_of_everything_is_no_network() -> None:
    taken = outer.taken_networks("0.0.0.0/1 dev tun0\n128.0.0.0/1 dev tun0\n")
    assert outer.free_net(taken) == Net(77)


def test_no_net_is_free() -> None:
    assert outer.free_net([ipaddress.IPv4Network("10.0.0.0/8")]) is None


def test_addresses_of_a_net() -> None:
    net = Net(81)
    assert (net.hosts, net.fabric, net.host(13)) == ("10.81.0.0/24", "10.81.0.1", "10.81.0.13")
    assert ipaddress.IPv4Address(net.outer_end) in ipaddress.IPv4Network(net.transit)
    assert ipaddress.IPv4Address(net.fabric_end) in ipaddress.IPv4Network(net.transit)
    assert not ipaddress.IPv4Network(net.hosts).overlaps(ipaddress.IPv4Network(net.transit))


@pytest.mark.parametrize(
    ("routes", "interface"),
    [
        (DOCKER_ROUTES, "ens3"),
        ("default via 192.0.2.1 dev eth0 \n192.0.2.0/24 dev eth0\n", "eth0"),
        ("default dev wg0 scope link metric 50\ndefault via 1.2.3.4 dev eth0 metric 20\n", "eth0"),
        ("10.0.0.0/24 dev eth0\n", None),
    ],
)
def test_the_outer_interface(routes: str, interface: str | None) -> None:
    assert outer.default_interface(routes) == interface


def test_hosts_never_get_a_stub_resolver() -> None:
    stub = "nameserver 127.0.0.53\noptions edns0\n"
    real = "# by systemd-resolved\nnameserver 192.0.2.53\nnameserver ::1\nsearch lan\n"
    expected = "nameserver 192.0.2.53\noptions timeout:1 attempts:1\n"
    assert outer.host_resolv_conf(stub, real) == expected
    assert outer.host_resolv_conf(stub, "") == ""


def test_docker_drops_what_it_forwards() -> None:
    assert outer.forward_is_dropped("-P FORWARD DROP\n-A FORWARD -j DOCKER-USER\n")
    assert not outer.forward_is_dropped("-P FORWARD ACCEPT\n")
    assert not outer.forward_is_dropped("")


V2 = (
    "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
)
HYBRID = """\
36 24 0:31 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
37 36 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
38 36 0:33 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
39 36 0:34 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_cgroup_layouts() -> None:
    assert outer.cgroups(V2) == outer.Cgroups("v2", "/sys/fs/cgroup")
    hybrid = outer.Cgroups("hybrid", "/sys/fs/cgroup/unified", ("memory", "systemd"))
    assert outer.cgroups(HYBRID) == hybrid
    v1 = "".join(line + "\n" for line in HYBRID.splitlines() if "cgroup2" not in line)
    assert outer.cgroups(v1) == outer.Cgroups("v1", None, ("memory", "systemd"))
    assert outer.cgroups("") == outer.Cgroups("none")
    spaced = "30 24 0:26 / /my\\040bed/cgroup2 rw - cgroup2 cgroup2 rw\n"
    assert outer.cgroups(spaced).unified == "/my bed/cgroup2"
