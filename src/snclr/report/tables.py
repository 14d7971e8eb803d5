"""The tables of a page: evaluations with their protocols, bad images, settings, and the numbers behind the curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from snclr.json_values import is_number
from snclr.report.curves import Metric, value_words
from snclr.report.markup import escape, figure, name

MOST_RESULTS = 100
MOST_SKIPPED = 100
MOST_LINES = 40
_WORDS = {"top1": "top-1", "top5": "top-5"}
_SHARES = ("top", "same_class_at_", "accuracy")
_LONG = 600


def results_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Evaluations, newest first, each with how it was measured."""
    shown = list(results)[::-1][:MOST_RESULTS]
    rows = "".join(
        f'<tr><th scope="row">{name(one["kind"], 60)}</th><td class="numbers">{_numbers(one["numbers"])}</td>'
        f'<td class="how">{name(one.get("protocol") or "no protocol was written", _LONG)}{_facts(one)}</td>'
        f'<td class="when">{escape(str(one.get("time", "")).replace("T", " ").partition("+")[0], 40)}</td></tr>'
        for one in shown
    )
    more = f"<p class=protocol>The newest {len(shown):,} of {len(results):,}.</p>" if len(results) > len(shown) else ""
    head = _head("evaluation", "result", "protocol", "when (UTC)")
    return f'<div class="wide"><table class="results">{head}<tbody>{rows}</tbody></table></div>{more}'


def skipped_table(skipped: Sequence[Mapping[str, Any]]) -> str:
    """Images that could not be used, and why."""
    rows = "".join(
        f'<tr><td class="key">{name(one.get("key", "?"))}</td><td>{name(one.get("reason", "?"), 300)}</td></tr>'
        for one in skipped[:MOST_SKIPPED]
    )
    more = ""
    if len(skipped) > MOST_SKIPPED:
        more = f"<p class=protocol>The first {MOST_SKIPPED} of {len(skipped):,}; all are in skipped.jsonl.</p>"
    return f'<div class="wide"><table>{_head("image", "why")}<tbody>{rows}</tbody></table></div>{more}'


def settings_table(settings: Mapping[str, Any]) -> str:
    """Every setting of the run, in the order of config.yaml."""
    rows = "".join(
        f"<div><dt>{name(key, 60)}</dt><dd>{name(_plain(value), _LONG)}</dd></div>" for key, value in settings.items()
    )
    return f'<dl class="settings">{rows}</dl>'


def lines_table(records: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]) -> str:
    """Logged lines, evenly chosen, the last among them: the curves for those who cannot see them."""
    known = [metric for metric in metrics if any(is_number(record.get(metric.name)) for record in records)]
    count = min(len(records), MOST_LINES)
    places = sorted({round((number + 1) * len(records) / count) - 1 for number in range(count)})
    rows = []
    for place in places:
        record = records[place]
        cells = "".join(
            f'<td class="number">{escape(value_words(record[metric.name], metric))}</td>'
            if is_number(record.get(metric.name)) else "<td>–</td>"
            for metric in known
        )  # fmt: skip
        epoch = record.get("epoch")
        rows.append(
            f'<tr><th scope="row">{int(record["step"]):,}</th><td class="number">'
            f"{figure(epoch) if is_number(epoch) else '–'}</td>{cells}</tr>"  # type: ignore[arg-type]
        )
    head = _head("step", "epoch", *(metric.title for metric in known))
    return f'<div class="wide"><table class="lines">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def headline(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The newest top-1 of each kind of evaluation, as name, value and "top-1"."""
    newest: dict[str, str] = {}
    for one in results:
        value = one["numbers"].get("top1")
        if is_number(value):
            newest[str(one["kind"])] = f"{value:.1%}"
    return [(kind, value, "top-1") for kind, value in newest.items()]


def _numbers(numbers: Mapping[str, Any]) -> str:
    parts = []
    for key, value in list(numbers.items())[:40]:
        if is_number(value):
            told = f"{value:.2%}" if key.startswith(_SHARES) and 0 <= value <= 1 else figure(value)
            words = _WORDS.get(key, key.replace("_", " "))
            parts.append(f"<span><small>{name(words, 40)}</small> {escape(told)}</span>")
    return "".join(parts) or "–"


def _facts(one: Mapping[str, Any]) -> str:
    """What else a result says, where that is short: the learning rate that was used, images that were left out."""
    known = [
        f"{name(key.replace('_', ' '), 40)} {escape(figure(value))}"
        for key, value in one.items()
        if key not in ("kind", "time", "numbers", "protocol") and is_number(value)
    ]
    return f"<small>{', '.join(known[:8])}</small>" if known else ""


def _head(*names: str) -> str:
    return "<thead><tr>" + "".join(f'<th scope="col">{escape(words)}</th>' for words in names) + "</tr></thead>"


def _plain(value: object) -> str:
    """A setting as it is typed."""
    if value is None:
        return "none"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else value
        if isinstance(value, str)
        else json.dumps(value, default=str)
    )
