"""Two "hosts" on one machine: network namespaces with a link between them that can be cut and restored.

Each has its own loopback and one address on the link. The file system and the host name are shared. `link_cut` is a
trial of `tests/reliability/promises.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snclr.checkpoint.format import Checkpoint, latest_checkpoint
from tests.distributed.launcher import snclr
from tests.helpers.state_digest import digest
from tests.reliability.harness import Sandbox, last_step

PORT = 29400
TIMEOUT = 10.0
MARGIN = 20.0
"""Seconds beyond the timeout within which both ranks must end."""
HANG_SECONDS = 600.0
"""Seconds after which a process counts as hung, even on a busy machine; TCP alone would wait 15 minutes."""
SETTINGS = {
    "recipe": "demo", "batch_size": 8, "epochs": 8, "image_size": 16, "queue_length": 30, "neighbors": 3, "hidden": 16,
    "dim": 8, "workers": 0, "optimizer": "sgd", "lr": 0.01, "warmup_epochs": 0, "checkpoint_every": 4, "log_every": 1,
    "precision": "64", "threads": 1, "timeout": TIMEOUT,
}  # fmt: skip
_numbers = itertools.count()
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}


def missing_requirement() -> str | None:
    """Return why network namespaces cannot be created here, or None if they can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        Hosts().close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return None


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Hosts:
    """Two network namespaces and the link; `close` kills the processes in them and removes them."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.names = tuple(f"snclr-{os.getpid()}-{number}{side}" for side in "ab")
        self.addresses = ("10.93.0.1", "10.93.0.2")
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", "link0", "netns", self.names[0], "type", "veth",
                "peer", "name", "link1", "netns", self.names[1])  # fmt: skip
            for side, name in enumerate(self.names):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{self.addresses[side]}/24", "dev", f"link{side}")
            self.restore()
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Drop all packets silently, as when a cable is pulled out of a switch."""
        for side, name in enumerate(self.names):
            _ip("-n", name, "link", "set", f"link{side}", "down")

    def restore(self) -> None:
        """Set both ends up."""
        for side, name in enumerate(self.names):
            _ip("-n", name, "link", "set", f"link{side}", "up")

    def torchrun(self, side: int, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
        """Start one of two ranks on that host by `torchrun --rdzv-backend c10d`, as on real hosts.

        The host name does not resolve to the address in the namespace, so torchrun gets the address, gloo the
        interface, and host 0 is set as the host of the rendezvous.
        """
        command = [
            "ip", "netns", "exec", self.names[side], sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-id", "job",
            "--rdzv-endpoint", f"{self.addresses[0]}:{PORT}", "--rdzv-conf", f"is_host={int(side == 0)}",
            "--local-addr", self.addresses[side], *map(str, arguments),
        ]  # fmt: skip
        environment = os.environ | _ENVIRONMENT | {"GLOO_SOCKET_IFNAME": f"link{side}"}
        with log.open("wb") as file:
            return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)

    def empty(self, seconds: float = 10.0) -> bool:
        """Wait up to `seconds` until no process is left in the namespaces; return whether none is."""
        deadline = time.monotonic() + seconds
        while left := any(_ip("netns", "pids", name).split() for name in self.names):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return not left

    def close(self) -> None:
        """Kill the processes in the namespaces and remove them with the link."""
        existing = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        own = [name for name in self.names if name in existing]
        deadline = time.monotonic() + 20
        while any(pids := [_ip("netns", "pids", name).split() for name in own]) and time.monotonic() < deadline:
            for pid in (pid for some in pids for pid in some):
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        for name in own:
            _ip("netns", "delete", name)


class Job:
    """The same `snclr pretrain --resume` on both hosts; `outputs` is what each printed."""

    def __init__(self, hosts: Hosts, data: Path, out: Path) -> None:
        self.out = out
        self.logs = [out.with_name(f"{out.name}-{side}-{time.monotonic_ns()}.txt") for side in "ab"]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        command = ("-m", "snclr", "pretrain", *flags, f"--data={data}", f"--out={out}", "--resume")
        self.agents = [hosts.torchrun(side, self.logs[side], *command) for side in (0, 1)]

    @property
    def outputs(self) -> list[str]:
        return [log.read_text(errors="replace") for log in self.logs]

    def wait(self) -> list[int | None]:
        """Wait for both torchrun agents and return their exit codes."""
        deadline = time.monotonic() + HANG_SECONDS
        while any(agent.poll() is None for agent in self.agents):
            assert time.monotonic() < deadline, "still running:\n" + "\n---\n".join(self.outputs)
            time.sleep(0.05)
        return [agent.returncode for agent in self.agents]

    def wait_for_errors(self) -> None:
        """Wait until both ranks have printed which rank is missing."""
        deadline = time.monotonic() + HANG_SECONDS
        while not all("Ranks that do not respond" in text for text in self.outputs):
            assert time.monotonic() < deadline, f"no error after {HANG_SECONDS:.0f} s:\n" + "\n---\n".join(self.outputs)
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has done that many steps."""
        deadline = time.monotonic() + HANG_SECONDS
        while last_step(self.out) < step:
            codes = [agent.poll() for agent in self.agents]
            assert codes == [None, None], f"ended with {codes} before step {step}:\n" + "\n---\n".join(self.outputs)
            assert time.monotonic() < deadline, f"step {step} was not reached:\n" + "\n---\n".join(self.outputs)
            time.sleep(0.01)


def end_of(out: Path) -> Checkpoint:
    """Return the last checkpoint; a damaged one is a failure."""
    found = latest_checkpoint(out / "checkpoints", lambda text: pytest.fail(text))
    assert found is not None
    return found


def cut_and_restart(hosts: Hosts, data: Path, out: Path, step: int, reference: Path, *, strict: bool = False) -> None:
    """Cut the link after that step: both ranks name the missing one and end; a restart gives the reference result.

    With `strict` the ranks must end within the timeout and `MARGIN`. torchrun's agent on the second host waits for its
    rendezvous in code that no signal interrupts until TCP gives up, so the link is restored before the agents end.
    """
    job = Job(hosts, data, out)
    job.wait_for_step(step)
    hosts.cut()
    began = time.monotonic()
    try:
        job.wait_for_errors()
        took = time.monotonic() - began
    finally:
        hosts.restore()
    codes = job.wait()
    assert 0 not in codes, job.outputs
    assert hosts.empty(), "no process outlives its job"
    assert not strict or took <= TIMEOUT + MARGIN, f"{took:.1f} s from the cut to the end of both\n" + "\n".join(
        job.outputs
    )
    for side, text in enumerate(job.outputs):  # each rank names the other
        assert f"Ranks that do not respond: {1 - side}." in text, text
    before, expected = end_of(out), end_of(reference)
    assert 0 < before.step < expected.step
    again = Job(hosts, data, out)
    assert again.wait() == [0, 0], again.outputs
    assert f"resuming after step {before.step} of {expected.step}" in "".join(again.outputs)
    found = end_of(out)
    assert digest(found.tensors, found.step) == digest(expected.tensors, expected.step)
    assert (out / "encoder.safetensors").read_bytes() == (reference / "encoder.safetensors").read_bytes()


def reference_run(data: Path, out: Path) -> Path:
    """Train without interruption on two ranks of this host."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    snclr(2, "pretrain", *flags, f"--data={data}", f"--out={out}")
    return out


def link_cut(sandbox: Sandbox, seed: int) -> None:
    """Cut the link between two hosts during training: both ranks end in time, and a restart is bit-identical."""
    if reason := missing_requirement():
        pytest.skip(reason)
    hosts, reference = Hosts(), sandbox.root / "reference-hosts"
    try:
        if not (reference / "encoder.safetensors").exists():
            reference_run(sandbox.images, reference)
        cut_and_restart(
            hosts,
            sandbox.images,
            sandbox.new_path("cut"),
            5 + 7 * seed % 32,
            reference,
            strict=sandbox.check_time_limits,
        )
    finally:
        hosts.close()
