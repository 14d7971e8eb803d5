"""Copies one batch ahead, on streams that record what happens in which order."""

import contextlib

import torch

from snclr.data import workers as module
from snclr.data.workers import copy_ahead, started_ahead


def test_the_next_item_is_started_before_one_is_yielded():
    events = []
    started = started_ahead(iter(range(3)), lambda item: events.append(f"start {item}") or item)
    events.extend(f"use {item}" for item in started)
    assert events == ["start 0", "start 1", "use 0", "start 2", "use 1", "use 2"]
    assert list(started_ahead(iter(()), str)) == []


def test_a_cpu_gets_the_items_themselves():
    item = torch.ones(2)
    (got,) = copy_ahead(iter([item]), torch.device("cpu"), lambda item: [item], lambda item, parts: parts[0])
    assert got is item


def test_a_gpu_copies_on_its_side_stream_and_waits_before_the_use(monkeypatch):
    """CUDA's streams are replaced by ones that write down their calls; the copies stay on the CPU."""
    events, current = [], ["main"]

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            return len([event for event in events if event.startswith("copy")])

        def wait_event(self, event):
            events.append(f"{self.name} waits for copy {event}")

    @contextlib.contextmanager
    def use(stream):
        current[0] = stream.name
        yield
        current[0] = "main"

    class Copy(torch.Tensor):
        def record_stream(self, stream):
            events.append(f"{int(self)} is used on {stream.name}")

    def copied(tensor, device):
        events.append(f"copy {int(tensor)} on {current[0]} to {device}")
        return tensor.as_subclass(Copy)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(current[0]))
    monkeypatch.setattr(module, "to_device", copied)
    items = ({"image": torch.tensor(number)} for number in (1, 2))
    replaced = copy_ahead(
        items, torch.device("cuda:0"), lambda item: [item["image"]], lambda item, parts: {**item, "image": parts[0]}
    )
    events.extend(f"step {int(item['image'])}" for item in replaced)
    assert events == [
        "copy 1 on side to cuda:0", "copy 2 on side to cuda:0",
        "main waits for copy 1", "1 is used on main", "step 1",
        "main waits for copy 2", "2 is used on main", "step 2",
    ]  # fmt: skip
