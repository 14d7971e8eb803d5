"""metrics.jsonl after any kill and resume is what an uninterrupted run writes."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr.errors import UserError
from snclr.train.metrics import MetricsLog, read_metrics


def plain_log(folder: Path, resume_step: int | None = None) -> MetricsLog:
    return MetricsLog(folder, resume_step=resume_step)


def write(folder: Path, steps: range, resume_step: int | None = None) -> None:
    with plain_log(folder, resume_step) as log:
        for step in steps:
            log.write(step, step // 4, {"loss": 1 / step, "note": "ü"}, timing={"seconds": time.time()})


def without_timing(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "timing"} for record in records]


def test_written_metrics_are_read_back(tmp_path: Path) -> None:
    values = {"loss": torch.tensor(0.5), "count": np.int64(3), "share": np.float32(0.25), "flag": True, "none": None}
    with plain_log(tmp_path) as log:
        log.write(7, 1.5, {**values, "text": "a\nb"})
        assert read_metrics(tmp_path) != []  # written at once
        log.sync()
    log.close()
    expected = {"loss": 0.5, "count": 3, "share": 0.25, "flag": True, "none": None, "text": "a\nb"}
    assert read_metrics(tmp_path) == [{"step": 7, "epoch": 1.5, **expected}]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_nonfinite_values_are_null_and_flagged(tmp_path: Path) -> None:
    with plain_log(tmp_path) as log:
        log.write(1, 0, {"a": float("nan"), "b": torch.tensor(float("inf")), "c": np.float64("-inf"), "d": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=pytest.fail)  # strict JSON: no NaN or Infinity
    assert [record[name] for name in "abcd"] == [None, None, None, 1.0]
    assert record["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}


def test_other_types_are_refused_without_a_partial_line(tmp_path: Path) -> None:
    with plain_log(tmp_path) as log, pytest.raises(TypeError):
        log.write(1, 0, {"x": object()})
    assert read_metrics(tmp_path) == []


def test_missing_and_empty_files_have_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    plain_log(tmp_path).close()
    assert read_metrics(tmp_path) == []


@settings(max_examples=40)
@given(cut=st.integers(0, 10**6), resume_step=st.integers(0, 12) | st.none())
def test_a_kill_at_any_byte_and_a_resume_give_the_uninterrupted_file(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resume_step: int | None
) -> None:
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    write(whole, range(1, 13))
    write(killed, range(1, 13))
    file = killed / "metrics.jsonl"
    content = file.read_bytes()
    # Lines up to the checkpoint were on disk before it; the kill cuts somewhere after them.
    safe = sum(len(line) + 1 for line in content.split(b"\n")[: resume_step or 0])
    file.write_bytes(content[: safe + cut % (len(content) - safe + 1)])
    read_metrics(killed)  # accepts the incomplete line
    write(killed, range((resume_step or 0) + 1, 13), resume_step)
    assert without_timing(read_metrics(killed)) == without_timing(read_metrics(whole))
    assert len(file.read_bytes().splitlines()) == 12


def test_resuming_does_not_rewrite_a_correct_file(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    plain_log(tmp_path, 4).close()
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


@pytest.mark.parametrize("bad", [b"garbage", b"\x00\x00", b"[1]", b'{"loss": 1}', b"[" * 50_000])
def test_an_invalid_line_is_an_error_for_readers_and_dropped_on_resume(
    tmp_path: Path, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, range(1, 3))
    file = tmp_path / "metrics.jsonl"
    first, second, _ = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([first, bad, second, b""]))
    with pytest.raises(UserError, match="line 2 of"):
        read_metrics(tmp_path)
    write(tmp_path, range(3, 4), 2)
    assert "line 2 of" in caplog.text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with plain_log(tmp_path) as log:
        log.write(1, 0, {"loss": 1.0})

        def full(fd: int, data: bytes) -> int:
            real(fd, data[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as context:
            context.setattr(os, "write", full)
            with pytest.raises(UserError, match=r"metrics\.jsonl .* bytes needed"):
                log.write(2, 0, {"loss": 2.0})
        log.write(2, 0, {"loss": 2.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


# -------------------- TensorBoard


def events(file: Path) -> list[Any]:
    """The records of an event file: length (8 bytes), its checksum (4), the message, its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    content, found, at = file.read_bytes(), [], 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        found.append(Event.FromString(content[at + 12 : at + 12 + length]))
        at += 16 + length
    return found


def scalars(file: Path) -> list[tuple[int, str, float]]:
    return [(event.step, value.tag, value.simple_value) for event in events(file) for value in event.summary.value]


def test_tensorboard_gets_the_same_values_and_a_session_start_on_resume(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, resume_step=None) as log:
        log.write(1, 0, {"train/loss": 0.5, "flag": True, "note": "x", "bad": float("nan")}, timing={"seconds": 2})
        (file,) = (tmp_path / "tensorboard").iterdir()
        assert scalars(file) == [(1, "train/loss", 0.5), (1, "timing/seconds", 2.0)]  # written at once
    with MetricsLog(tmp_path, resume_step=1) as log:
        log.write(2, 0, {"train/loss": 0.25})
    first, second = sorted((tmp_path / "tensorboard").iterdir())  # two files in order, even within a second
    assert scalars(first)[0] == (1, "train/loss", 0.5)
    assert scalars(second) == [(2, "train/loss", 0.25)]
    from tensorboardX.proto.event_pb2 import SessionLog

    starts = [[e.step for e in events(f) if e.session_log.status == SessionLog.START] for f in (first, second)]
    assert starts == [[0], [2]]


def test_a_renamed_metric_is_read_and_resumed_under_its_present_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0, "same_class": 0.25}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "epoch": 0, "neighbor_purity": 0.25}]
    with plain_log(tmp_path, resume_step=1) as log:
        log.write(2, 0, {"neighbor_purity": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["neighbor_purity"] for line in lines] == [0.25, 0.5]
