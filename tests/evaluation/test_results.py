from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from snclr.errors import UserError
from snclr.evaluation.results import append_result, read_results


def test_results_are_read_in_order(tmp_path: Path) -> None:
    written = append_result(tmp_path, "knn", {"top1": 0.5, "top5": None}, "kNN: k = 200 → test", step=10, data="demo")
    append_result(tmp_path, "linear", {"top1": 0.75}, "linear")
    first, second = read_results(tmp_path)
    assert first == written
    assert first["numbers"] == {"top1": 0.5, "top5": None}
    assert (first["protocol"], first["step"], first["data"]) == ("kNN: k = 200 → test", 10, "demo")
    assert first["time"] <= second["time"]
    assert [result["kind"] for result in read_results(tmp_path, "linear")] == ["linear"]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_a_run_without_results_gives_an_empty_list(tmp_path: Path) -> None:
    assert read_results(tmp_path) == []


def test_a_truncated_line_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append_result(tmp_path, "knn", {"top1": 0.5}, "p")
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes() + b'{"kind": "knn", "numb')
    append_result(tmp_path, "linear", {"top1": 0.6}, "p")
    with caplog.at_level(logging.WARNING):
        assert [result["kind"] for result in read_results(tmp_path)] == ["knn", "linear"]
    assert "line 2" in caplog.text


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    append_result(tmp_path, "knn", {"top1": float("nan"), "loss": float("inf")}, "p")
    line = (tmp_path / "results.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["numbers"] == {"top1": None, "loss": None}


def test_concurrent_writers_do_not_mix_lines(tmp_path: Path) -> None:
    def write(kind: str) -> None:
        for number in range(20):
            append_result(tmp_path, kind, {"number": number}, "x" * 5000)

    writers = [threading.Thread(target=write, args=(kind,)) for kind in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for kind in ("a", "b", "c"):
        assert [result["numbers"]["number"] for result in read_results(tmp_path, kind)] == list(range(20))


def test_a_missing_run_directory_raises_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        append_result(tmp_path / "nowhere", "knn", {}, "p")
    assert not (tmp_path / "nowhere").exists()
