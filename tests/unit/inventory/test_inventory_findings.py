"""Problems of inventories: file, host, variable, sentence, hint; all at once, before any connection."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from invented_hosts import stated

from provision.base.errors import UsageError
from provision.inventory import InventoryError, load
from provision.survey import Facts
from provision.survey.preflight import inventory_problems


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(name: str, text: str | bytes, limit: str | None = None) -> str:
    """What `load` says of a file, as one text."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InventoryError) as caught:
        load(name, limit=limit)
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2
    return str(caught.value)


# (the file's name, its text, what must be said)
WRONG: list[tuple[str, str, str]] = [
    # variables
    (
        "h.ini",
        "[g]\na\n[g:vars]\nprovision_prefx=/x\n",
        "unknown variable `provision_prefx` (host `a`)\n  → did you mean `provision_prefix`?",
    ),
    ("h.ini", "a provision-python=python3.11\n", "unknown variable `provision-python` (host `a`)\n  → did you mean `provision_python`?"),
    ("h.ini", "a Provision_Sudo=no\n", "unknown variable `Provision_Sudo` (host `a`)\n  → did you mean `provision_sudo`?"),
    ("h.ini", "a provison_interface=eth0\n", "unknown variable `provison_interface` (host `a`)\n  → did you mean `provision_interface`?"),
    (
        "h.ini",
        "a provision_colour=blue\n",
        "h.ini: unknown variable `provision_colour` (host `a`)\n  → known are `slots`, `provision_prefix`",
    ),
    ("h.yml", "all: {vars: {provision_sdo: no}, hosts: {a: , b: }}\n", "h.yml: unknown variable `provision_sdo` (hosts `a`, `b`)\n"),
    # wrong values
    ("h.ini", "a slots=two\n", "h.ini: slots must be a whole number from 1 to 1000000, not `two` (host `a`)"),
    ("h.ini", "a slots=99999999999999999999\n", "h.ini: slots must be a whole number from 1 to 1000000, not `99999999999999999999`"),
    ("h.ini", "a slots=0\n", "h.ini: slots must be a whole number from 1 to 1000000, not `0`"),
    ("h.ini", "a slots=-1\n", "h.ini: slots must be a whole number from 1 to 1000000, not `-1`"),
    ("h.ini", "a slots=2.5\n", "h.ini: slots must be a whole number from 1 to 1000000, not `2.5`"),
    ("h.ini", "[g]\na\nb\n[g:vars]\nslots=many\n", "h.ini: slots must be a whole number from 1 to 1000000, not `many` (hosts `a`, `b`)"),
    ("h.yml", "all:\n  hosts:\n    a:\n      slots: true\n", "h.yml: slots must be a whole number from 1 to 1000000, not `true`"),
    ("h.yml", "all:\n  hosts:\n    a:\n      slots:\n", "h.yml: slots must be a whole number from 1 to 1000000, not empty"),
    ("h.yml", "all:\n  hosts:\n    a:\n      slots: [1]\n", "h.yml: slots must be a whole number from 1 to 1000000, not `[1]`"),
    ("h.ini", "a ansible_port=ssh\n", "h.ini: ansible_port must be a whole number from 1 to 65535, not `ssh` (host `a`)"),
    ("h.ini", "a ansible_port=70000\n", "h.ini: ansible_port must be a whole number from 1 to 65535, not `70000`"),
    ("h.ini", "a ansible_ssh_port=0\n", "h.ini: ansible_ssh_port must be a whole number from 1 to 65535, not `0`"),
    ("h.ini", "a ansible_host=-oProxyCommand=id\n", "h.ini: ansible_host must be a host name or an address, not `-oProxyCommand=id`"),
    ("h.ini", "a ansible_user=-oProxyCommand=id\n", "h.ini: ansible_user must be a login name, not `-oProxyCommand=id`"),
    ("h.ini", "a ansible_ssh_user=-oProxyCommand=id\n", "h.ini: ansible_ssh_user must be a login name, not `-oProxyCommand=id`"),
    ("h.yml", "all: {hosts: {'{{ 1 }}': }}\n", "h.yml: '{{ 1 }}' is not a host name"),
    ("h.yml", "all: {hosts: {'../a': }}\n", "h.yml: '../a' is not a host name"),
    ("h.yml", "all: {hosts: {'~.*': }}\n", "h.yml: '~.*' is not a host name"),
    ("h.ini", "a provision_python=/usr/bin/python3;id\n", "h.ini: provision_python must be an absolute path"),
    ("h.yml", 'all: {hosts: {a: {provision_python: "python3\\n"}}}\n', "h.yml: provision_python must be an absolute path"),
    ("h.yml", "all: {hosts: {a: {ansible_host: }}}\n", "h.yml: ansible_host must be a host name or an address, not empty"),
    ("h.yml", "all: {hosts: {a: {provision_python: ' python3'}}}\n", "h.yml: provision_python must be an absolute path"),
    ("h.yml", "all: {hosts: {a: {ansible_user: ' root'}}}\n", "h.yml: ansible_user must be a login name"),
    ("h.yml", "all: {hosts: {a: {ansible_host: true}}}\n", "h.yml: ansible_host must be a host name or an address, not `true`"),
    (
        "h.ini",
        "a provision_prefix=opt/x\n",
        "h.ini: provision_prefix must be an absolute path, such as /opt/provision, not `opt/x` (host `a`)",
    ),
    ("h.ini", "a provision_prefix=/usr/\n", "h.ini: provision_prefix `/usr/` is a folder of the system; choose a folder of its own"),
    ("h.ini", "a provision_prefix=/\n", "is a folder of the system"),
    ("h.ini", "a provision_prefix=//\n", "is a folder of the system"),
    (
        "h.ini",
        'a provision_prefix="/my files"\n',
        "h.ini: provision_prefix `/my files` has characters that compilers and loaders do not handle",
    ),
    ("h.yml", 'all: {hosts: {a: {provision_prefix: "/opt/x\\n"}}}\n', "has characters"),
    ("h.ini", "a provision_prefix=/opt/x/../../etc\n", "has characters"),
    ("h.ini", "a provision_sudo=maybe\n", "h.ini: provision_sudo must be yes or no, not `maybe` (host `a`)"),
    ("h.ini", "a provision_python=perl\n", "h.ini: provision_python must be an absolute path or a name like python3.11, not `perl`"),
    ("h.ini", "a provision_interface=lo\n", "h.ini: provision_interface must be the name of a network interface that reaches other hosts"),
    ("h.ini", 'a provision_interface="eth0 eth1"\n', "h.ini: provision_interface must be the name of a network interface"),
    ("h.ini", 'a slots="{{ gpus }}"\n', "h.ini: the template in `slots` cannot be resolved: 'gpus' is undefined (host `a`)"),
    ("h.ini", 'a slots="{{ 1/0 }}"\n', "h.ini: the template in `slots` cannot be resolved: "),
    # duplicates
    ("h.ini", "a ansible_host=10.0.0.1\nb ansible_host=10.0.0.1\n", "h.ini: hosts `a` and `b` are the same machine: address 10.0.0.1\n"),
    ("h.ini", "10.0.0.1\nb ansible_host=10.0.0.1 ansible_port=22\n", "h.ini: hosts `10.0.0.1` and `b` are the same machine"),
    ("h.ini", "a ansible_host=x.lab\nb ansible_host=X.LAB.\n", "h.ini: hosts `a` and `b` are the same machine"),
    ("h.ini", "a ansible_host=x:1\nb ansible_host=y ansible_port=9\nc ansible_host=y ansible_port=9\n", "address y port 9\n"),
    ("h.ini", "a ansible_connection=local\nb ansible_connection=local\n", "hosts `a` and `b` are the same machine: this machine itself"),
    ("h.ini", "a ansible_connection=local\nb ansible_host=127.0.0.1\n", "are the same machine: this machine itself"),
    # what Ansible cannot read, in its words
    (
        "h.ini",
        "a\nb 2 3\n",
        "h.ini:2: Ansible cannot read it: Expected key=value host variable assignment, got: 2\n"
        "  → correct it, and try: ansible-inventory --list -i h.ini",
    ),
    ("h.ini", "a\n[g:hots]\nb\n", "h.ini:2: Ansible cannot read it: Section [g:hots] has unknown type: hots"),
    ("h.ini", "a\nb\n[gpu:vars]\nslots 2\n", "h.ini:4: Ansible cannot read it: Expected key=value, got: slots 2\n"),
    ("h.ini", 'a x="1\n', "h.ini:1: Ansible cannot read it: Error parsing host definition: No closing quotation\n"),
    ("h.ini", "a\n[g\nb\n", "h.ini:2: Ansible cannot read it: "),
    ("h.ini", "a\n[gpu:vars", "h.ini:2: Ansible cannot read it: "),
    ("h.ini", "a\n\n[g:vars]\nx=1\n", "Ansible cannot read it: Section [g:vars] not valid for undefined group"),
    ("h.ini", "[g:children]\nx\n", "h.ini:2: Ansible cannot read it: Section [g:children] includes undefined group"),
    ("h.ini", "all:\n  hosts:\n", "h.ini:1: Ansible cannot read it: Invalid host pattern 'all:' supplied"),
    ("h.ini", "node[1:x]\n", "h.ini:1: Ansible cannot read it: "),
    ("h.yml", "all:\n  hosts:\n    a: {\n", "h.yml:4: Ansible cannot read it: "),
    ("h.yml", "all:\n  hosts:\n  - a\n", 'h.yml: Ansible cannot read it: Invalid "hosts" entry for "all" group, requires a dictionary'),
    ("h", "all:\n  hosts:\n  - a\n", 'h: Ansible cannot read it: Invalid "hosts" entry for "all" group, requires a dictionary'),
    ("h", "a b\n", "h:1: Ansible cannot read it: Expected key=value host variable assignment, got: b"),
    ("h.yml", "- a\n", "h.yml: Ansible cannot read it: YAML inventory has invalid structure, it should be a dictionary"),
    ("h.yml", "all:\n  hosts:\n    1:\n", "h.yml: Ansible cannot read it: Host pattern 1 must be a string"),
    (
        "h.yml",
        "all: {hosts: {a: {foo: &a [1, *a]}}}\n",
        "h.yml: Ansible cannot read it: a value contains itself or is nested too deeply\n",
    ),
    ("h.yml", "plugin: no.such\n", "h.yml: Ansible cannot read it: inventory config"),
    ("h.yml", "all:\n  hots:\n    a:\n", "h.yml: Ansible says: Skipping unexpected key (hots) in group (all)"),
    # nothing
    ("h.ini", "", "h.ini: the inventory has no hosts"),
    ("h.ini", "# only a comment\n", "h.ini: the inventory has no hosts"),
    ("h.ini", "[g]\n", "h.ini: the inventory has no hosts"),
    ("h.ini", "node[3:1]\n", "h.ini: the inventory has no hosts"),
]


SLOTS = "it looks like a list of hosts and their slots, and not like an inventory"
OTHER_FORMATS = [
    ("h", "n1:8\nn2:8\n", f"h:1: {SLOTS}\n  → write `n1 slots=8`; for ssh on another port `n1 ansible_port=PORT`"),
    ("h", "[gpu]\r\nnode[1:3]:64  # Horovod\r\n", f"h:2: {SLOTS}\n  → write `node[1:3] slots=64`"),
    ("h", "a:192\n", f"h:1: {SLOTS}"),
    ("h", "10.1.0.1 4\n", f"h:1: {SLOTS}\n  → write `10.1.0.1 slots=4`"),
    (
        "h",
        "a\nb\na  # again\na\n",
        "h: host `a` is named 3 times in its group, which is how Open MPI's hostfiles count slots\n  → name it once",
    ),
    ("h", "127.0.0.1 localhost\n10.1.0.1 a secret7\n", "h:1: it looks like /etc/hosts"),
    ("h", "fd00::7 a a.example\n", "→ write each host as `a ansible_host=fd00::7`"),
    ("h", "Include more\n\nhost gpu1\n  HostName 10.1.0.1\n", "h:3: it looks like ssh's configuration"),
    ("h.conf", "GresTypes=gpu\nNodeName=gpu[01-16] CPUs=8\n", "h.conf:2: it looks like slurm.conf"),
    (
        "h.json",
        '{"_meta": {"hostvars": {"a": {}}}, "all": {"children": ["gpu"]}, "gpu": {"hosts": ["a"]}}',
        "h.json: it is the output of ansible-inventory",
    ),
    ("h.ini", "\ufeff[gpu]\r\na\r\n", "h.ini:1: it begins with a byte order mark"),
    ("h.ini", "a ansible_hosts=10.1.0.1\n", "unknown variable `ansible_hosts` (host `a`)\n  → did you mean `ansible_host`?"),
    ("h.ini", "a ansible_usr=b\n", "→ did you mean `ansible_user`?"),
]


@pytest.mark.parametrize(("name", "text", "said"), OTHER_FORMATS)
def test_lists_of_other_programs_are_named_and_not_misread(name: str, text: str, said: str) -> None:
    told = complaint(name, text)
    assert said in told
    assert "secret7" not in told


@pytest.mark.parametrize(
    "text",
    [
        "n1:2222\nn2:22\n",
        "fd00::1\nfd00::2\n",
        "[fd00::1]:2222\n",
        "[a]\nn1\nn2\n[b]\nn1\n",
        "n1\nn1 slots=3\n",
        "host ansible_host=10.1.0.1\nmatch slots=2\n",
        "n1 ansible_port=80\n[all:vars]\nansible_ssh_pass=a\nansible_user_id=3\nansible_hostname=b\nansible_sftp_extra_args=c\n",
        "all:\n  hosts:\n    n1:\n  children:\n    g:\n      hosts:\n        n1:\n",
    ],
)
def test_valid_lists_are_not_taken_for_others(text: str) -> None:
    name = "h.yml" if text.startswith("all:") else "h.ini"
    Path(name).write_text(text)
    assert load(name).problems == ()


@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_errors(name: str, text: str, said: str) -> None:
    assert said in complaint(name, text)


def test_variables_in_files_next_to_the_inventory() -> None:
    for path, text in (("group_vars/g.yml", "a: 1\nprovision_pyton: python3\n"), ("host_vars/a.yml", "provision_prefix: here\n")):
        Path(path).parent.mkdir()
        Path(path).write_text(text)
    said = complaint("h.ini", "[g]\na\n")
    assert "h.ini: unknown variable `provision_pyton` (host `a`)\n  → did you mean `provision_python`?" in said
    assert "h.ini: provision_prefix must be an absolute path" in said


def test_one_bad_file_in_a_folder_is_named() -> None:
    Path("site").mkdir()
    Path("site/good").write_text("a\n")
    Path("site/bad").write_text("b oops\n")
    Path("site/worse.yml").write_text("- b\n")
    with pytest.raises(InventoryError) as caught:
        load("site")
    assert re.search(r"^site/bad:1: Ansible cannot read it: .*Expected key=value", str(caught.value), re.M)
    assert "site/worse.yml: Ansible cannot read it: YAML inventory has invalid structure" in str(caught.value)


def test_invalid_utf8() -> None:
    assert "h.ini:2: Ansible cannot read it" in complaint("h.ini", b"a\n\xff\xfe b\n")


def test_errors_contain_no_excerpt_of_the_file() -> None:
    """Ansible before 2.19 shows the lines around a mistake, and passwords may stand in them."""
    assert "hunter2" not in complaint("h.yml", "all:\n  hosts:\n    a: {ansible_password: hunter2}\n   b: {\n")


@pytest.mark.parametrize(
    "text",
    [
        "node1 ansible_become_password='hunter2\n",
        "a provision_prefix=\"{{ 'hunter2' oops }}\"\n",
        "a provision_prefix=\"{{ 'hunter2' + 1 }}\"\n",
        'a provision_prefix="{{ x }}" x="{{ \'hunter2\' ~ y }}"\n',
        'a provision_prefix="{{ x }}" x="{{ \'hunter2\' oops }}"\n',
        'a provision_prefix="{{ x }}" x="{{ 1/0 ~ \'hunter2\' }}"\n',
    ],
)
def test_no_line_and_no_template_is_quoted(text: str) -> None:
    assert "hunter2" not in complaint("h.ini", text)


def test_variables_of_a_host_that_are_a_list_are_not_quoted() -> None:
    Path("host_vars").mkdir()
    Path("host_vars/a.yml").write_text("- {password: hunter2}\n")
    said = complaint("h.ini", "a\n")
    assert "failed to combine variables, expected dicts but got" in said
    assert "hunter2" not in said


def test_a_program_that_cannot_run_is_not_read_as_text() -> None:
    for text in ("#!/nosuch/interp\n", "#!/bin/sh\nfalse\n"):
        Path("h").write_text(text)
        Path("h").chmod(0o755)
        with pytest.raises(InventoryError, match=r"^h: Ansible cannot read it: "):
            load("h")


def test_an_executable_file_of_hosts_is_read() -> None:
    Path("h").write_text("a\n")
    Path("h").chmod(0o755)
    assert [host.name for host in load("h").hosts] == ["a"]


def test_all_problems_at_once_errors_first() -> None:
    said = complaint(
        "h.ini", "a slots=none\nlocalhost provision_colour=1\nc ansible_port=0 provision_prefix=x\nd ansible_host=c ansible_port=0\n"
    )
    said_of = re.findall(r"^h\.ini: (?:unknown variable )?`?([\w-]+)", said, re.M)
    assert said_of == ["hosts", "provision_colour", "slots", "ansible_port", "provision_prefix", "localhost"]


def test_a_range_of_a_thousand_hosts_is_one_problem() -> None:
    said = complaint("h.ini", "node[1:1000] slots=x provision_colour=1\n")
    assert said.count("h.ini: ") == 2
    few = "`node1`, `node2`, `node3`, `node4`, `node5`, `node6` and 994 more"
    assert f"slots must be a whole number from 1 to 1000000, not `x` (hosts {few})" in said


# what is no mistake
RIGHT = [
    ("h.ini", "[x]\na\nb\n[y]\na\nb\n"),
    ("h.ini", "[x]\na ansible_host=1.1.1.1\n[y]\na ansible_host=1.1.1.1\n"),
    ("h.ini", "a ansible_host=1.1.1.1 ansible_port=2201\nb ansible_host=1.1.1.1 ansible_port=2202\n"),
    ("h.ini", "a colour=blue my_slots_note=x slot_machine=y gpu_slots_total=2 rack=7 gpu_count=8 provisioner=me provision=x host=x\n"),
    ("h.ini", "a ansible_ssh_common_args='-J jump' ansible_become_password=x ansible_shell_type=sh ansible_ssh_retries=3\n"),
    ("h.ini", "a ansible_distribution_release=x ansible_winrm_transport=ntlm ansible_psrp_auth=x\n"),
    ("h.ini", "[g]\na\n[g:vars]\nslots='2'\n"),
    ("h.yml", 'all:\n  hosts:\n    a: {slots: "2"}\n'),
    ("h.yml", "x-common: &c\n  vars: {slots: 2}\nall:\n  hosts:\n    a:\n      <<: {slots: 4}\n"),
    ("h.ini", "a # a comment\n# another\n; third\n"),
    ("h.ini", "[g] # a comment\na # and here\n"),
    ("h.ini", "[gpu-nodes]\na\n"),
]


@pytest.mark.parametrize(("name", "text"), RIGHT)
def test_valid_inventories(name: str, text: str) -> None:
    Path(name).write_text(text)
    assert load(name).problems == ()


# (file, text, warning)
DOUBTFUL = [
    ("h.ini", "localhost\n", "h.ini: `localhost` is reached over SSH"),
    ("h.ini", "a provision_interface=docker0\n", "h.ini: provision_interface `docker0` looks like a bridge for containers"),
    ("h.ini", "a solts=2\n", "h.ini: unknown variable `solts` (host `a`)\n  → did you mean `slots`?"),
    ("h.ini", "a slot=2\n", "h.ini: unknown variable `slot` (host `a`)\n  → did you mean `slots`?"),
    ("h.yml", "all: {hosts: {a: {slots: 1, slots: 2}}}\n", "h.yml: Ansible says: "),
    ("h.yml", "all: {hosts: {a: }, hots: {b: }}\n", "h.yml: Ansible says: Skipping unexpected key (hots) in group (all)"),
    ("h.ini", "[a]\na\n", "h.ini: Ansible says: Found both group and host with same name: a"),
]


@pytest.mark.parametrize(("name", "text", "said"), DOUBTFUL)
def test_warnings(name: str, text: str, said: str) -> None:
    Path(name).write_text(text)
    (finding,) = load(name).problems
    assert finding.severity == "warning"
    assert said in str(finding)


# ------------------------------------------------------------------------------------------------------------- arguments

ARGUMENTS = [
    ("hosts.ini", "hosts.ini: no such file\n  → did you mean ./host.ini?"),
    ("esx.ini", "esx.ini: no such file\n  → name a file"),
    ("tset.ini", "tset.ini: no such file\n  → did you mean ./test.ini?"),
    ("./inventroy/hosts.yml", "./inventroy/hosts.yml: no such file"),
    ("host", "host: no such file\n  → did you mean ./hosts?"),
    ("missing.yml", "missing.yml: no such file\n  → name a file, `localhost`, or hosts (user@host, host:port"),
    ("a b", "a b: `a b` is not a host name"),
    ("a,,b!", "a,,b!: `b!` is not a host name"),
    ("a,a", "a,a: host `a` is named twice"),
    ("a:ssh,b", "a:ssh,b: `a:ssh` is not a host name"),
    ("a:99999", "a:99999: `a:99999`: port 99999 is out of range"),
    ("-a,b", "-a,b: `-a` is not a host name"),
    ("root\n@a,b", "is not a user name"),
    ("-oProxyCommand=x@a", "`-oProxyCommand=x` is not a user name"),
    (",", ",: no hosts are named"),
    ("", "HOSTS: no hosts are named"),
    ("localhost,127.0.0.1", "hosts `localhost` and `127.0.0.1` are the same machine: this machine itself"),
]


@pytest.mark.parametrize(("argument", "said"), ARGUMENTS)
def test_invalid_arguments(argument: str, said: str) -> None:
    Path("host.ini").write_text("a\n")
    Path("hosts").write_text("a\n")
    Path("test.ini").write_text("a\n")
    with pytest.raises(InventoryError) as caught:
        load(argument)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_low_port_in_a_list_is_a_warning() -> None:
    (finding,) = load("a:2").problems
    assert str(finding) == "a:2: `a:2` means SSH on port 2, not 2 slots\n  → slots need an inventory file: `NAME slots=N`"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("alhpa", "--limit alhpa: no host or group is called `alhpa`\n  → did you mean `alpha`?"),
        ("alpha,zz", "--limit alpha,zz: no host or group is called `zz`\n  → hosts are alpha, beta"),
        ("!alpha:!beta", "--limit !alpha:!beta: it leaves no host"),
        ("gpu:&cpu", "no host or group is called `&cpu`"),
        ("u*", "no host or group is called `u*`"),  # not the group `ungrouped`, which every inventory has
        ("[!abg]*", "no host or group is called `[!abg]*`"),
        *((limit, f"--limit {limit!r}: invalid pattern: expected") for limit in ("", "  ", ",", ":", "[", "]", "~", "!~", "[,]")),
        *((limit, f"--limit {limit!r}: invalid pattern: expected") for limit in ("!", "&", "alpha,!", "alpha:&", "!!alpha", "alpha[")),
        ("@none", "--limit '@none': invalid pattern: expected"),
        ("@sign", "--limit '@sign': invalid pattern: expected"),
    ],
)
def test_limit_that_matches_nothing(limit: str, said: str) -> None:
    Path("none").write_text("\n")
    Path("sign").write_text("alpha\n!\n")
    assert said in complaint("h.ini", "[gpu]\nalpha\nbeta\n", limit=limit)


def test_missing_limit_file() -> None:
    assert "Unable to find limit file" in complaint("h.ini", "a\n", limit="@nope")


# ----------------------------------------------------------------------------------------------------- against the facts


def facts(gpus: int = 0, cores: int = 8, interfaces: tuple[str, ...] = ("eth0",), instances: int = 0) -> Facts:
    listed = [{"name": name, "up": not name.startswith("down"), "loopback": False, "virtual": False} for name in interfaces]
    in_parts = [{"name": "GPU", "mig": "Enabled", "mig_instances": instances}] if instances else []
    return stated({"gpus": [{"name": "GPU"}] * gpus + in_parts, "cpu": {"cores": cores}, "network": {"interfaces": listed}})


@pytest.mark.parametrize(
    ("variables", "seen", "level", "said"),
    [
        (
            "slots=4",
            facts(gpus=2),
            "error",
            "host `a` has 2 GPUs but slots=4; NCCL refuses two ranks on one GPU (h.ini)\n  → set slots=2 or less",
        ),
        ("slots=1", facts(gpus=4), "warning", "host `a` has 4 GPUs but slots=1; 3 would stay idle"),
        ("slots=8", facts(gpus=7, instances=2), "warning", "host `a` has 8 GPUs but slots=8; with MIG mode on, 1 rank can have a GPU"),
        (
            "slots=9",
            facts(cores=8),
            "warning",
            "host `a` has 8 cores but slots=9; ranks would take turns on the cores (h.ini)\n  → set slots=8 or less",
        ),
        ("provision_interface=ib0", facts(), "error", "host `a` has no interface `ib0` (h.ini)\n  → it has eth0"),
        (
            "provision_interface=down0",
            facts(interfaces=("eth0", "down0")),
            "error",
            "interface `down0` of host `a` is down (h.ini)\n  → up are eth0",
        ),
    ],
)
def test_inventory_against_facts(variables: str, seen: Facts, level: str, said: str) -> None:
    Path("h.ini").write_text(f"a {variables}\n")
    (finding,) = inventory_problems(load("h.ini"), {"a": seen})
    assert (finding.severity, finding.host) == (level, "a")
    assert said in str(finding)


def test_no_problem_for_hosts_that_fit_or_have_no_facts() -> None:
    Path("h.ini").write_text("a slots=2\nb slots=99\nc\n")
    assert inventory_problems(load("h.ini"), {"a": facts(gpus=2), "c": facts(gpus=8)}) == []
    Path("h.ini").write_text("a slots=1\n")
    assert inventory_problems(load("h.ini"), {"a": facts(gpus=7, instances=2)}) == []


def test_a_fifo_in_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hosts"
    folder.mkdir()
    (folder / "a.ini").write_text("node1\n")
    (folder / ".git").mkdir()
    for hidden in (".git/x.ipc", ".x"):
        os.mkfifo(folder / hidden)
    assert [host.name for host in load(str(folder)).hosts] == ["node1"]
    os.mkfifo(folder / "x")
    with pytest.raises(InventoryError, match="x: it is not a regular file"):
        load(str(folder))


@pytest.mark.parametrize("line", ["h" * 70_000, "a " * 35_000, "a[1:3] " + "x=y " * 20_000, "# " + "-" * 70_000])
@pytest.mark.parametrize("name", ["h.ini", "hosts", "folder/group_vars/all"])
def test_a_line_that_ansible_would_read_for_minutes_is_one_error(name: str, line: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"a\n{line}\n")
    with pytest.raises(InventoryError, match=rf"^{name}: a line has more than 64 kB") as caught:
        load(path.parts[0])
    assert len(caught.value.problems) == 1


def test_a_long_line_of_json_or_yaml_is_read(here: Path) -> None:
    hosts = ", ".join(f'"node{number}": {{"slots": 2}}' for number in range(3000))
    for name in ("h.yml", "hosts"):
        (here / name).write_text(f'{{"all": {{"hosts": {{{hosts}}}}}}}\n')
        assert len(load(name).hosts) == 3000


def test_what_is_too_large_for_an_inventory_is_one_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provision.inventory.loading._MAX_FILES", 20)
    (here / "top/one/two").mkdir(parents=True)
    for number in range(30):
        (here / f"top/one/two/{number}").write_text("a\n")
        os.mkfifo(here / f"top/one/two/x{number}")
    with pytest.raises(InventoryError, match=r"^top: it has more than 20 files, and cannot be an inventory") as caught:
        load("top")
    assert len(caught.value.problems) == 1
    with (here / "large.yml").open("wb") as file:
        file.truncate((32 << 20) + 1)
    with pytest.raises(InventoryError, match=r"^large\.yml: it has more than 32 MB"):
        load("large.yml")
