"""The promises of docs/reliability.md, each with its trial and the number of trials in `make test` and `make soak`.

A trial is a function (sandbox, seed) that raises if the promise is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.distributed import steps, two_hosts
from tests.reliability import damage, disks, fuzz, kills, names, payloads, ranks, stops, unusual_images
from tests.reliability.harness import Sandbox

Trial = Callable[[Sandbox, int], None]


@dataclass(frozen=True)
class Promise:
    """A row of the table: `short` has the seeds of `make test`, `full` the number of seeds of `make soak`."""

    row: str
    text: str
    trial: Trial
    full: int
    short: tuple[int, ...]
    checks: int = 1
    """Number of cases in one trial."""

    @property
    def multi_rank(self) -> bool:
        """Whether a trial trains on several ranks."""
        return self.trial.__module__ in (ranks.__name__, two_hosts.__name__, steps.__name__)

    @property
    def name(self) -> str:
        return f"{self.row} {self.trial.__name__}"


PROMISES = (
    Promise("1", "the same command gives the same run, with 0 or 2 loader workers", kills.repeat, 10, (0,)),
    Promise("1", "the same on two ranks", ranks.repeat_ranks, 10, ()),  # test_pretrain_ranks.py
    Promise("2", "kill -9 at a random time, then --resume: same result", kills.random_kill, 50, (1, 2)),
    Promise(
        "2", "kill -9 at a forced point of a write, rename or deletion", kills.forced_kill, len(kills.FORCED), (0, 5)
    ),
    Promise("2", "kill -9 of an evaluation; the same command gives the same result", kills.evaluation_kill, 20, (1,)),
    Promise("3", "one of two ranks is killed under torchrun --max-restarts: same result", ranks.rank_killed, 20, (0,)),
    Promise(
        "4", "a second run in the same directory is refused; after a kill the lock is free", kills.second_run, 6, (1,)
    ),
    Promise(
        "4", "the torchrun agent is killed: its ranks exit within 10 s, and --resume works", ranks.agent_killed, 6, (0,)
    ),
    Promise("5", "SIGTERM, SIGUSR1 or Ctrl-C to the process or its group, 0 or 2 workers", stops.stop, 12, (0, 7)),
    Promise(
        "5", "Ctrl-C while modules are imported: exit code 130, no files", stops.early_interrupt, 30, tuple(range(6))
    ),
    Promise(
        "5",
        "SIGTERM, SIGUSR1 or Ctrl-C to the torchrun agent or the group, 0 or 2 workers",
        ranks.stop_ranks,
        12,
        (0,),
    ),
    Promise(
        "6",
        "resumed on 2, 1 and 2 ranks: every step has the same images",
        ranks.resized,
        3,
        (),  # test_pretrain_ranks.py
    ),
    Promise(
        "6",
        "200 steps in double precision on 2 and 4 ranks: weights equal those of one rank to 1e-8",
        steps.two_hundred_steps,
        2,
        (),  # takes minutes; test_world_size.py has 60 steps of a ViT
    ),
    Promise("7", "full disk (writes fail after n bytes)", disks.failing_writer, 10, (1, 3)),
    Promise("7", "full disk (a tmpfs of a few hundred kilobytes)", disks.small_tmpfs, 5, (2,)),
    Promise("8", "a damaged checkpoint is skipped with a warning", damage.damaged, 200, tuple(range(12))),
    Promise(
        "9",
        "opening a file never executes code from it",
        payloads.payload,
        len(payloads.PAYLOADS),
        (1, 8, 13, 15, 22, 24),
    ),
    Promise(
        "10", "unusual images are decoded correctly, bad ones rejected with a reason", unusual_images.decoded, 2, (0, 1)
    ),
    Promise(
        "10",
        "bad images are replaced deterministically from any step; too many stop the run",
        unusual_images.loaded,
        20,
        (1,),
    ),
    Promise("10", "a run on unusual and bad images: same result with 0 and 2 workers", unusual_images.trained, 3, (0,)),
    Promise(
        "11",
        "loss or gradient of one rank is nan or inf: all ranks stop before the update",
        ranks.nonfinite,
        8,
        (0, 1),
    ),
    Promise("12", "a suspended rank (SIGSTOP) ends the job within the timeout and is named", ranks.stopped, 4, (1,)),
    Promise(
        "12",
        "the link between two hosts is cut: both exit in time and name the other; a restart gives the same result",
        two_hosts.link_cut,
        8,
        (),  # test_hosts.py has one
    ),
    Promise("13", "hostile names of images and folders, report opened in a browser", names.hostile_names, 10, (0,)),
    Promise(
        "14",
        "a golden run of every schema opens, resumes and is evaluated",
        damage.golden,
        2 * len(damage.GOLDEN_RUNS),
        tuple(range(2 * len(damage.GOLDEN_RUNS))),
    ),
    Promise(
        "14",
        "a checkpoint or encoder of an unknown schema is refused and nothing is written",
        damage.unknown_schema,
        6,
        (0,),
    ),
    Promise(
        "15",
        "mutated manifests, headers, settings, lists and shards",
        fuzz.fuzz,
        200,
        tuple(range(12)),
        checks=fuzz.MUTATIONS,
    ),
)
