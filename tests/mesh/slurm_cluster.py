"""A real SLURM on this machine: munged, slurmctld and a slurmd for each node, which all have addresses of their own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from local_ports import free_port

COMMANDS = ("setpriv", "unshare", "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
DEADLINE_S = 120.0
CONF = """
ClusterName=meshrl
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_setup_env_fail,batch_sched_delay=1,sched_interval=5,bf_interval=5
ReturnToService=2
SlurmdTimeout=30
KillWait=10
MinJobAge=600
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN\n"
APART = 'mount -t tmpfs none "$0" && exec "$@"'


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd starts jobs as their user, which takes root"


class SlurmCluster:
    """The daemons, and commands to them."""

    def __init__(self, folder: Path, nodes: int, private: Mapping[str, Path] | None = None) -> None:
        """private: folders that a node, by its name, does not share with the others: it has an empty one of its own."""
        self.folder, self._private = folder, private or {}
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host, ports = socket.gethostname().split(".")[0], free_ports(nodes + 1)
        lines = [
            NODE.format(name=name, host=host, address=f"127.0.0.{place + 2}", port=ports[place + 1])
            for place, name in enumerate(self.names)
        ]
        conf = CONF.format(folder=folder, host=host, port=ports[0])
        (folder / "slurm.conf").write_text(conf.replace("PartitionName", "".join(lines) + "PartitionName"))
        (folder / "state").mkdir()

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        at = self.folder / "munge"
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={at}.socket",
                    f"--pid-file={at}.pid", f"--log-file={at}.log", f"--seed-file={at}.seed")  # fmt: skip
        self.wait_for(lambda: (self.folder / "munge.socket").exists(), "munged listens")
        self._start("slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf"))
        for name in self.names:
            own = self._private.get(name)
            apart = () if own is None else ("unshare", "--mount", "sh", "-c", APART, str(own))
            self._start(*apart, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), key=name)
        self.wait_for(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == f"idle {len(self.names)}", "all nodes are idle")

    def _start(self, *command: str, key: str = "") -> None:
        with (self.folder / f"{key or command[0]}.log").open("wb") as log:
            self._daemons[key or command[0]] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # a killed test runner leaves no daemon
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, *command: str) -> str:
        """What a command of SLURM prints; empty when it fails."""
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environ, timeout=DEADLINE_S, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", number)))

    def seen_by(self, name: str, path: Path) -> Path:
        """What a node that runs sees at an absolute path."""
        return Path(f"/proc/{self._daemons[name].pid}/root", *path.parts[1:])

    def halt_programs(self, name: str) -> None:
        """What jobs run on the node stands still; the node itself answers."""
        for pid in self._running_on(name, self._daemons[name].pid)[0]:
            os.kill(pid, signal.SIGSTOP)

    def kill_node(self, name: str) -> None:
        """The node is gone at once, with all that ran on it."""
        daemon = self._daemons.pop(name)
        programs, steps = self._running_on(name, daemon.pid)
        for pid in (daemon.pid, *steps, *programs):
            kill(pid)
        daemon.wait(timeout=DEADLINE_S)

    def _running_on(self, name: str, daemon: int) -> tuple[list[int], list[int]]:
        """Process ids of the programs of jobs on a node, and of what started them."""
        spool = str(self.folder / f"spool.{name}")
        marks = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()}
        programs, steps = [], []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ = set((entry / "environ").read_bytes().split(b"\0"))
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            if marks <= environ:
                programs.append(int(entry.name))
            elif words.startswith("slurmstepd") and self._is_step_of(entry, daemon, spool):
                steps.append(int(entry.name))
        return programs, steps

    def _is_step_of(self, entry: Path, slurmd: int, spool: str) -> bool:
        opened = (os.readlink(each) for each in (entry / "fd").iterdir() if each.is_symlink())
        status = (entry / "stat").read_text().rpartition(")")[2].split()
        return int(status[1]) == slurmd or any(path.startswith(spool) for path in opened)

    def stop(self) -> None:
        for number in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", "--signal=KILL", "--full", number)
            self.ask("scancel", number)
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
            try:
                daemon.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        mark = f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()
        for entry in Path("/proc").glob("[0-9]*"):  # steps whose slurmd was killed
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                    kill(int(entry.name))
            except OSError:
                continue

    def wait_for(self, what: Callable[[], object], said: str, deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not what():
            logs = "".join(f"\n--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"not in {deadline_s} s: {said}{logs}"
            time.sleep(0.2)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


@contextmanager
def cluster(folder: Path, nodes: int, private: Mapping[str, Path] | None = None) -> Iterator[SlurmCluster]:
    """A cluster for as long as the block lasts."""
    slurm = SlurmCluster(folder, nodes, private)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
