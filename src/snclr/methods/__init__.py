"""The methods, by name. Each is a page of its own; the training loop knows only `base.Method`."""

from __future__ import annotations

METHODS: dict[str, str] = {
    "snclr": "Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning (ICLR 2023), Eq. 2",
}
