from __future__ import annotations

from pathlib import Path

from snclr.checkpoint.run_dir import RunDir
from snclr.reports.run_state import COMPLETE, read_state


def test_a_run_is_in_progress_only_while_its_lock_is_held(tmp_path: Path) -> None:
    started, ended = [{"seconds": None}], [{"seconds": 3.0}]
    with RunDir.create(tmp_path / "my run") as run:
        holder = run.lock.path.read_bytes()
        assert read_state(RunDir(run.path), started, []).title == "in progress"
        assert run.lock.path.read_bytes() == holder
        assert read_state(RunDir(run.path), ended, []).title == "stopped"
    killed = read_state(run, started, [{"step": 7}])
    assert killed.text == "stopped at step 7"
    assert killed.resume == f"snclr pretrain --resume --out '{run.path}'"
    (run.checkpoints / "step-0000000005").mkdir(parents=True)
    assert read_state(run, started, [{"step": 7}]).note == "at step 5"  # where a resume continues
    run.encoder_weights.touch()
    assert read_state(run, ended, []) == COMPLETE
