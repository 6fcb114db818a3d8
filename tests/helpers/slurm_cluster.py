"""A real Slurm cluster on this machine.

It has a controller, accounting, and four nodes with four fake GPUs each. Every node is a network namespace with a
separate address, hostname and ports, as on a real cluster. The machine's installed Slurm configuration, if any, is
not used or changed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

PACKAGES = "slurmctld slurmd slurm-client slurmdbd munge mariadb-server-core mariadb-client-core iproute2"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "slurmdbd", "munged", "mariadbd", "mariadb-install-db", "ip", "nsenter")
NODES, CPUS, GPUS, MEMORY_MB = 4, 8, 4, 16000
MAX_CLUSTERS = 32
"""Test clusters that may run on one machine at the same time."""
DEADLINE_S = 600.0
"""A time that only a broken cluster misses, also on a busy machine."""
LONGEST_ROOT = 70
"""Characters of the path of a cluster. The sockets of Slurm's steps add 35, and a socket's path has at most 107."""

REQUEUE_DELAY_S = 80
"""Time until Slurm starts a requeued job; two minutes by default. Each step must start in this time."""

SBIN = "/usr/sbin:/sbin"


def missing_requirement() -> str | None:
    """Return why no cluster can be started here, with a hint; None if one can."""
    path = f"{os.environ['PATH']}:{SBIN}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install --no-install-recommends {PACKAGES}"
    if os.geteuid() != 0:
        return (
            "the test cluster creates network namespaces, which needs root: run the tests as root, or skip these "
            "with -m 'not slow and not slurm'"
        )
    return None


@contextmanager
def running_cluster(root: Path) -> Iterator[Cluster]:
    """Start a cluster, and stop it at the end of the block."""
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Cluster:
    """A Slurm cluster in a folder.

    After ``stop`` no process and no network interface is left.

    Attributes:
        root: Folder of configuration, logs and state.
        slot: Number of the cluster on this machine; -1 before the start.
        claim: Open lock file of the slot; -1 before the start and after the end.
        daemons: The started daemons by name.
        nodes: Names of the compute nodes.
        env: Environment variables for Slurm's commands.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slot = self.claim = -1
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = [f"node{number}" for number in range(1, NODES + 1)]
        self.env = {**os.environ, "PATH": f"{os.environ['PATH']}:{SBIN}", "SLURM_CONF": str(root / "etc/slurm.conf")}

    # Start and stop

    def start(self) -> None:
        """Start all daemons in order, and wait until all nodes are idle."""
        assert len(str(self.root)) <= LONGEST_ROOT, f"{self.root} is too long for the sockets of Slurm's steps"
        for name in ("etc", "run", "log", "state", "spool", "dev", "db"):
            (self.root / name).mkdir(parents=True)
        self._claim_slot()
        self._write_configuration()
        self._make_network()
        self._start_munge()
        self._start_database()
        self._start_on("head", "slurmdbd", "slurmdbd", "-D", env={"SLURM_CONF": str(self.root / "etc/slurm.conf")})
        self._wait_for("accounting", lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"))
        self.start_controller("-c")
        for node in self.nodes:
            self.start_node(node)
        self._wait_for("idle nodes", lambda: self.count_idle() == NODES)

    def start_controller(self, *options: str) -> None:
        """Start the controller; with ``-c`` it forgets all jobs."""
        self._start_on("head", "slurmctld", "slurmctld", "-D", *options)

    def stop_controller(self) -> None:
        """Stop the controller as for a restart."""
        controller = self.daemons.pop("slurmctld")
        controller.terminate()
        controller.wait(DEADLINE_S)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start_on(node, f"slurmd-{node}", "slurmd", "-D", "-N", node)

    def crash_node(self, node: str) -> None:
        """Kill the daemon of a node and all processes on it at once."""
        self._kill_all(node)
        self.daemons.pop(f"slurmd-{node}").wait(DEADLINE_S)

    def disconnect_node(self, node: str) -> None:
        """Disconnect a node for good; its processes continue on the shared file system."""
        self._ip("-n", self._namespace(node), "link", "set", "eth0", "down")

    def restore_node(self, node: str) -> None:
        """Bring back a node that crashed or was set down, and wait until it is idle."""
        if f"slurmd-{node}" not in self.daemons:
            self.start_node(node)
        state = f"sinfo -h -N -n {node} -p low -o %T".split()

        def idle() -> bool:
            found = self.command(*state).strip()
            if found == "down":  # set by the administrator; a node that did not answer is "down*" and recovers
                self._succeeds("scontrol", "update", f"nodename={node}", "state=resume")
            return found == "idle"

        self._wait_for(f"{node} to be idle", idle)

    def stop(self) -> None:
        """Kill all processes of the cluster, and remove its network."""
        if self.claim < 0:
            return
        self._kill_all()
        for daemon in reversed(self.daemons.values()):
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        self._remove_network()
        os.close(self.claim)
        self.claim = -1

    def processes(self, *hosts: str) -> list[psutil.Process]:
        """Return the processes on the given hosts, or on the whole cluster, without zombies.

        Each has its command line as ``info["cmdline"]``.
        """
        namespaces = set()
        for host in hosts or ("head", *self.nodes):
            name = Path(f"/run/netns/{self._namespace(host)}")
            if name.exists():
                namespaces.add(name.stat().st_ino)
        found = []
        for process in psutil.process_iter(["cmdline"]):
            try:
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino in namespaces:
                    found.append(process)
            except OSError:
                continue
        return found

    # Queries of tests

    def command(self, *arguments: str) -> str:
        """Run a Slurm command and return its output."""
        done = subprocess.run(arguments, env=self.env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def count_idle(self) -> int:
        """Return the number of idle nodes."""
        try:
            counted = self.command("sinfo", "-h", "-t", "idle", "-o", "%D").split()
        except AssertionError:
            return 0
        return sum(map(int, counted))

    def wait_accounted(self, job: str, field: str) -> str:
        """Wait until the accounting shows the end of a job, and return a field of it."""
        found = ""

        def has_ended() -> bool:
            nonlocal found
            state, _, found = self.command("sacct", "-X", "-n", "-P", "-j", job, "-o", f"State,{field}").partition("|")
            found = found.strip()
            return bool(state) and state.split()[0] not in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING")

        self._wait_for(f"{job} to end", has_ended)
        return found

    def restarts(self, job: str) -> int:
        """Return how often Slurm has requeued a job."""
        (count,) = re.findall(r"\bRestarts=(\d+)", self.command("scontrol", "show", "job", job))
        return int(count)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until the queue is empty."""
        self.command("scancel", "-u", "root")
        self._wait_for("an empty queue", lambda: not self.command("squeue", "-h"))

    # Implementation

    def _kill_all(self, *hosts: str) -> None:
        """Kill all processes on the given hosts, or on the whole cluster, also those that start meanwhile."""
        while found := self.processes(*hosts):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.1)
        logs = "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted((self.root / "log").glob("*.log"))
        )
        raise RuntimeError(f"the test cluster waited {DEADLINE_S:g} s for {what}\n{logs}")

    def _succeeds(self, *arguments: str) -> bool:
        done = subprocess.run(arguments, env=self.env, capture_output=True, check=False, timeout=DEADLINE_S)
        return done.returncode == 0

    def _start(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        ends_with_tests = ("setpriv", "--pdeathsig", "KILL")  # also if they are killed
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                (*ends_with_tests, *arguments),
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _start_on(self, host: str, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        hosts = self.root / "etc/hosts"
        script = f'hostname {host} && mount --bind {hosts} /etc/hosts && exec "$@"'
        prefix = (
            "nsenter",
            f"--net=/run/netns/{self._namespace(host)}",
            "unshare",
            "--uts",
            "--mount",
            "--propagation=slave",
        )
        self._start(name, *prefix, "bash", "-c", script, "bash", *arguments, env=env)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(("ip", *arguments), env=self.env, check=True, capture_output=True)

    def _claim_slot(self) -> None:
        """Lock a free slot until the end of this process, and remove what a killed owner left there."""
        for self.slot in range(MAX_CLUSTERS):
            claim = os.open(f"/run/distexp-test-cluster{self.slot}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(claim)
                continue
            if self._is_in_use():
                os.close(claim)
                continue
            self.claim = claim
            self._remove_network()
            return
        raise RuntimeError(f"{MAX_CLUSTERS} test clusters are already running on this machine")

    def _is_in_use(self) -> bool:
        """Return whether the bridge of the slot belongs to a living process that did not see the lock."""
        try:
            owner = Path(f"/sys/class/net/{self._bridge}/ifalias").read_text().strip()
        except OSError:
            return False
        return owner.isdigit() and psutil.pid_exists(int(owner))

    @property
    def _bridge(self) -> str:
        return f"dxbr{self.slot}"

    def _namespace(self, host: str) -> str:
        return f"dx{self.slot}{host}"

    def _address(self, host: str) -> str:
        return f"10.213.{self.slot}.{self._number(host)}"

    def _make_network(self) -> None:
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("link", "set", self._bridge, "alias", str(os.getpid()))
        self._ip("addr", "add", f"10.213.{self.slot}.254/24", "dev", self._bridge)
        self._ip("link", "set", self._bridge, "up")
        for number, host in enumerate(("head", *self.nodes)):
            namespace, link = self._namespace(host), f"dx{self.slot}v{number}"
            self._ip("netns", "add", namespace)
            self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._ip("link", "set", link, "master", self._bridge, "up")
            self._ip("-n", namespace, "addr", "add", f"{self._address(host)}/24", "dev", "eth0")
            self._ip("-n", namespace, "link", "set", "eth0", "up")
            self._ip("-n", namespace, "link", "set", "lo", "up")

    def _remove_network(self) -> None:
        for host in ("head", *self.nodes):
            if Path(f"/run/netns/{self._namespace(host)}").exists():
                self._ip("netns", "del", self._namespace(host))
        if Path(f"/sys/class/net/{self._bridge}").exists():
            self._ip("link", "del", self._bridge)

    def _number(self, host: str) -> int:
        return 253 if host == "head" else 1 + self.nodes.index(host)

    def _start_munge(self) -> None:
        key = self.root / "etc/munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        run = self.root / "run"
        files = (f"--key-file={key}", f"--pid-file={run}/munge.pid", f"--seed-file={run}/munge.seed")
        self._start("munged", "munged", "-F", "--force", f"--socket={run}/munge.sock", *files)
        self._wait_for("munge", lambda: _listens(run / "munge.sock"))

    def _start_database(self) -> None:
        db, path = self.root / "db", self.root / "run/mysql.sock"
        # The kernel's asynchronous requests can be used up by others on a busy machine.
        safe = ("--user=root", "--innodb-use-native-aio=OFF", "--innodb-log-file-size=8M")
        files = (f"--datadir={db}", f"--tmpdir={db}", *safe)
        self._install_database(db, *files)
        small = ("--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--performance-schema=OFF")
        where = (*files, f"--socket={path}", "--skip-networking", "--skip-log-bin")
        self._start("mariadbd", "mariadbd", "--no-defaults", *where, *small)
        self._wait_for("the database", lambda: _listens(path))
        self.env["MYSQL_UNIX_PORT"] = str(path)

    def _install_database(self, folder: Path, *options: str) -> None:
        """Create the tables; a second time if that fails, because it can on a busy machine."""
        quiet = ("--auth-root-authentication-method=normal", "--skip-test-db", "--force")
        command = ("mariadb-install-db", "--no-defaults", *options, *quiet)
        for _ in range(2):
            done = subprocess.run(
                command, env=self.env, check=False, capture_output=True, text=True, timeout=DEADLINE_S
            )
            if done.returncode == 0:
                return
            shutil.rmtree(folder)
            folder.mkdir()
        pytest.fail(f"the database of the cluster was not created: {done.stdout}{done.stderr}", pytrace=False)

    def _write_configuration(self) -> None:
        etc, lines = self.root / "etc", [f"{self._address(name)} {name}" for name in ("head", *self.nodes)]
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        for number in range(GPUS):
            os.mknod(self.root / f"dev/nvidia{number}", 0o666 | 0o020000, os.makedev(195, number))
        (etc / "slurm.conf").write_text(self._slurm_conf())
        (etc / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=node[1-{NODES}] Name=gpu File={self.root}/dev/nvidia[0-{GPUS - 1}]"
            " Flags=nvidia_gpu_env\n"
        )
        dbd = etc / "slurmdbd.conf"
        dbd.write_text(
            textwrap.dedent(f"""\
            AuthType=auth/munge
            AuthInfo=socket={self.root}/run/munge.sock
            DbdHost=head
            DbdAddr={self._address("head")}
            CommunicationParameters=NoInAddrAny
            SlurmUser=root
            PidFile={self.root}/run/slurmdbd.pid
            StorageType=accounting_storage/mysql
            StorageHost=localhost
            StorageUser=root
            CommitDelay=0
            """)
        )
        dbd.chmod(0o600)

    def _slurm_conf(self) -> str:
        root = self.root
        addresses = "\n".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={self._address(node)} Port=17003" for node in self.nodes
        )
        return textwrap.dedent(f"""\
            ClusterName=distexp
            SlurmctldHost=head({self._address("head")})
            SlurmctldPort=17001
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            AuthInfo=socket={root}/run/munge.sock,cred_expire={REQUEUE_DELAY_S}
            CredType=cred/munge
            MpiDefault=none
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            JobAcctGatherType=jobacct_gather/linux
            JobAcctGatherFrequency=task=1
            JobAcctGatherParams=OverMemoryKill
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU_Memory
            DefMemPerCPU=2000
            GresTypes=gpu
            SlurmdParameters=config_overrides
            CommunicationParameters=NoCtldInAddrAny
            StateSaveLocation={root}/state
            SlurmdSpoolDir={root}/spool/%n
            SlurmctldPidFile={root}/run/slurmctld.pid
            SlurmdPidFile={root}/run/slurmd-%n.pid
            SlurmdTimeout=30
            KillWait=30
            InactiveLimit=0
            MinJobAge=300
            ReturnToService=1
            JobRequeue=1
            EnforcePartLimits=ALL
            SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            SlurmctldParameters=preempt_send_user_signal
            AccountingStorageType=accounting_storage/slurmdbd
            AccountingStorageHost={self._address("head")}
            AccountingStoragePass={root}/run/munge.sock
            AccountingStorageTRES=gres/gpu
            NodeName=DEFAULT CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS}
            PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE
            PartitionName=high Nodes=ALL PriorityTier=100 PreemptMode=OFF MaxTime=INFINITE
            """).replace("PartitionName=low", f"{addresses}\nPartitionName=low")


def _listens(path: Path) -> bool:
    """Return whether a process accepts connections to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True
