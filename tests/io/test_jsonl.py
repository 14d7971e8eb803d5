"""JSON Lines files with damaged lines."""

import logging

import pytest

from snclr.errors import UserError
from snclr.io.jsonl import append_jsonl, read_jsonl

GOOD, DAMAGED = '{"step": 1}\n', '{"step": 2\n'


def test_a_missing_file_has_no_records(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_damaged_lines_are_skipped_reported_or_refused(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + DAMAGED + GOOD)
    assert read_jsonl(path) == [{"step": 1}] * 2
    with caplog.at_level(logging.WARNING):
        assert len(read_jsonl(path, on_invalid="warn")) == 2
    assert "line 2 of" in caplog.text
    with pytest.raises(UserError, match=r"line 2 of .* is not a valid record"):
        read_jsonl(path, on_invalid="raise")


def test_strict_reading_accepts_an_incomplete_last_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + DAMAGED.strip())
    assert read_jsonl(path, on_invalid="raise") == [{"step": 1}]


def test_a_record_must_have_the_required_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": true}\n{"step": "3"}\n[3]\n3\n' + GOOD)
    assert read_jsonl(path, fields={"step": int}) == [{"step": 1}]


def test_appending_after_an_incomplete_line_starts_a_new_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(DAMAGED.strip())
    append_jsonl(path, {"step": 5})
    assert read_jsonl(path) == [{"step": 5}]
