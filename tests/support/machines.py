"""Two machines on this one, by Linux namespaces: each with its own address, processes, shared memory and /tmp.

They have what is installed in common, as machines with one environment do. Of what a run reads and writes, `HERE` is
each machine's own and `SHARED` is the same on both. It takes root; `may_make_machines` tells.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

HERE, SHARED = Path("/mnt/here"), Path("/mnt/shared")
"""Outside, these are `folder / name` and `folder / "shared"`."""
ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
RAY_ADDRESS = f"{ADDRESSES['n1']}:6379"

_SETUP = """
set -e
mkdir -p {here} {shared}
mount --bind {folder}/{name} {here}
mount --bind {folder}/shared {shared}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size=4g tmpfs /dev/shm
hostname {name}
ip link set lo up
ip link add br0 type bridge
ip addr add {address}/24 dev br0
ip link set br0 up
ip route add default dev br0
touch {here}/.up
exec sleep infinity
"""
_KINDS = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child")
# The address is the bridge's, so that a machine keeps it when the other goes, and with it the cable.


def may_make_machines() -> bool:
    """Whether this process may make namespaces of every kind and a link between them."""
    if os.geteuid() != 0:
        return False
    links = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    tried = ["unshare", *_KINDS, "sh", "-c", f"mount -t tmpfs tmpfs /run && {links}"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


class Machine:
    """A machine that is on."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, ADDRESSES[name], folder / name
        is_up = self.folder / ".up"
        is_up.unlink(missing_ok=True)
        script = _SETUP.format(here=HERE, shared=SHARED, folder=folder, name=name, address=self.address)
        log = folder / f"{name}.log"
        with log.open("a") as file:
            self._keeper = subprocess.Popen(["unshare", *_KINDS, "bash", "-c", script], stderr=file)
        wait_until(is_up.exists, process=self._keeper, log=log, limit_s=60)
        (self._first,) = psutil.Process(self._keeper.pid).children()

    @property
    def pid(self) -> int:
        """The process, seen from outside, that has the machine's namespaces."""
        return self._first.pid

    def start(self, *command: str, variables: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a command in `HERE` there; what it prints goes to a file outside."""
        with log.open("w") as file:
            return self._popen(command, variables, stdout=file, stderr=subprocess.STDOUT)

    def run(self, *command: str, variables: Mapping[str, str], timeout_s: float = 120) -> str:
        """Run a command there and return what it prints; it must succeed."""
        process = self._popen(command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = process.communicate(timeout=timeout_s)[0].decode()
        assert process.returncode == 0, f"{self.name}: {' '.join(command)}\n{printed}"
        return printed

    def _popen(self, command: tuple[str, ...], variables: Mapping[str, str], **pipes: Any) -> "subprocess.Popen[bytes]":
        enter = ["nsenter", f"--target={self.pid}", "--all", f"--wdns={HERE}"]
        return subprocess.Popen([*enter, *command], env=dict(variables), **pipes)

    def lose_power(self) -> None:
        """End all its processes at once; its folder stays."""
        with suppress(psutil.NoSuchProcess):
            self._first.kill()
        self._keeper.wait(timeout=60)


def connect(one: Machine, other: Machine) -> None:
    """Lay a cable between two machines."""
    commands = [(one, ["add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(other.pid)])]
    commands += [(each, ["set", "eth0", "master", "br0", "up"]) for each in (one, other)]
    for machine, command in commands:
        subprocess.run(["nsenter", f"--target={machine.pid}", "--net", "ip", "link", *command], check=True)


@contextmanager
def two_machines(folder: Path) -> Iterator[list[Machine]]:
    """Turn on two machines that are connected; what the list has at the end is turned off with all that runs there."""
    for name in (*ADDRESSES, "shared"):
        (folder / name).mkdir()
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
    machines: list[Machine] = []
    try:
        machines.extend(Machine(name, folder) for name in ADDRESSES)
        connect(*machines)
        yield machines
    finally:
        for each in machines:
            each.lose_power()


def variables_there(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for the machines: this environment's programs, and a token, which Ray 2.60 asks nodes for."""
    path = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**variables, "PATH": path, "OMP_NUM_THREADS": "1", **token}


def start_ray(machine: Machine, *, variables: Mapping[str, str], num_gpus: int = 1) -> None:
    """Start Ray on a machine: the head on the first, and on the other what joins it."""
    is_head = machine.address in RAY_ADDRESS
    where = ["--head", "--port=6379"] if is_head else [f"--address={RAY_ADDRESS}"]
    sizes = [f"--num-gpus={num_gpus}", "--num-cpus=16", "--object-store-memory=500000000"]
    machine.run("ray", "start", *where, f"--node-ip-address={machine.address}", *sizes, variables=variables)


def wait_until(holds: Callable[[], bool], *, process: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> None:
    """Wait until something holds while a process goes on."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
        time.sleep(0.05)
