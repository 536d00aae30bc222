"""What a report says first: the few figures that matter, and how far `auto` is from the best."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.document import Times, is_peer, name_of, times_of
from benchmarks.report.text import format_us, markdown_table

__all__ = ["FAR", "AutoRow", "auto_rows", "auto_table", "headlines", "summary_lines"]

FAR = 1.10  # auto's time over the best algorithm's, above which a row is flagged
# What takes the algorithm that nobody has named, and what is asked for by name.
AUTO = {"allreduce": ("auto", "coalesced"), "processes": ("checked", "coalesced")}
NAMED = ("fused", "direct", "ring", "sharded", "naive")

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class AutoRow:
    """One case: what auto took, and the fastest algorithm that could have been named."""

    section: str
    case: str
    world_size: int
    auto: Times
    takes: str | None  # what auto took; None in results that do not say
    best: str
    best_times: Times

    @property
    def ratio(self) -> float:
        """Median of auto over that of the best one."""
        return self.auto.median_s / self.best_times.median_s

    @property
    def is_far(self) -> bool:
        """Whether somebody should look at it."""
        return self.ratio > FAR

    @property
    def is_noise(self) -> bool:
        """Whether the quartiles of both overlap, so that the difference says little."""
        low, high = self.auto.q1_s, self.best_times.q3_s
        return low is not None and high is not None and low <= high

    @property
    def took_another(self) -> bool:
        """Whether auto chose wrongly; with the same algorithm a difference is the machine's."""
        return self.takes not in (None, self.best)

    @property
    def mark(self) -> str:
        """What stands behind the ratio."""
        if not self.is_far:
            return ""
        return " **!** in the noise" if self.is_noise else " **!**"


def auto_rows(sections: Sections) -> list[AutoRow]:
    """Every size and number of ranks at which both auto and algorithms by name were measured."""
    found = []
    for section, names in AUTO.items():
        for (case, k), rows in _cases(sections, section):
            autos = [rows[name] for name in names if name in rows]
            named = {name: times_of(rows[name]) for name in NAMED if name in rows}
            if section == "processes":
                named.pop("naive", None)
            if autos and set(named) - {"naive"}:
                best = min(named, key=lambda name: named[name].median_s)
                auto, takes = times_of(autos[0]), autos[0].get("takes")
                found.append(AutoRow(section, case, k, auto, takes, best, named[best]))
    return found


def _cases(
    sections: Sections, section: str
) -> Iterator[tuple[tuple[str, int], dict[str, Mapping[str, Any]]]]:
    """Rows of a section, by case and ranks, then by name."""
    cases: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in sections.get(section, {}).get("rows", []):
        cases.setdefault((row["case"], row["world_size"]), {}).setdefault(name_of(row), row)
    yield from cases.items()


def auto_table(sections: Sections) -> str:
    """Auto beside the best algorithm, the farthest first; in words where there is nothing."""
    rows = sorted(auto_rows(sections), key=lambda row: -row.ratio)
    if not rows:
        return "No results here hold `auto` beside algorithms that were asked for by name."
    far = [row for row in rows if row.is_far]
    intro = (
        f"`auto` took more than {FAR:.2f} times the best algorithm's time in {len(far)} of "
        f"{len(rows)} cases, marked with **!**; in {_others(far)} of these it had taken another "
        "algorithm than that. On ranks that are lists of one process `naive` "
        "counts as an algorithm. In the noise: the quartiles of both overlap."
    )
    cells = [
        [
            *(row.section, row.case, row.world_size, format_us(row.auto.median_s * 1e6)),
            f"`{row.takes}`" if row.takes else "",
            *(f"`{row.best}`", format_us(row.best_times.median_s * 1e6)),
            f"{row.ratio:.2f}{row.mark}",
        ]
        for row in rows
    ]
    columns = "benchmark", "per rank", "ranks", "auto", "takes", "best", "its time", "auto / best"
    return f"{intro}\n\n{markdown_table(columns, cells)}"


def _others(rows: Sequence[AutoRow]) -> int:
    return sum(row.took_another for row in rows)


def summary_lines(sections: Sections) -> list[str]:
    """A sentence per section that was measured, with its figures."""
    makers = (_lists, _auto, _processes, _ddp, _bucketing, _training, _gpu)
    return [line for make in makers for line in make(sections)]


def headlines(sections: Sections) -> list[str]:
    """The first sentence each about ranks in lists, in processes, and under DDP."""
    makers = (_lists(sections), _processes(sections), _ddp(sections))
    return [line for lines in makers for line in itertools.islice(lines, 1)]


def _lists(sections: Sections) -> Iterator[str]:
    against: dict[str, list[tuple[float, str]]] = {"naive": [], "stack": []}
    shares = []
    for (case, k), rows in _cases(sections, "allreduce"):
        ours = [row for row in rows.values() if not is_peer(row)]
        own = next(
            (rows[n] for n in ("auto", "coalesced", "fused", "allreduce") if n in rows), None
        )
        if own is None or not ours:
            continue
        if own["size_bytes"] >= 2**24:
            shares.append(own["limit_share"])
        for peer, ratios in against.items():
            if peer in rows:
                ratio = times_of(rows[peer]).median_s / times_of(own).median_s
                ratios.append((ratio, f"{case}, {k} ranks"))
    for peer, words in (("naive", "the book's loop"), ("stack", "`torch.stack().sum()`")):
        if against[peer]:
            yield f"Ranks that are lists of one process, against {words}: {_range(against[peer])}."
    if shares:
        yield (
            f"From 16 MiB on a call reaches {min(shares):.0%} to {max(shares):.0%} of the rate at "
            f"which memory is read and written once (median {statistics.median(shares):.0%})."
        )


def _range(ratios: list[tuple[float, str]]) -> str:
    """Median and ends of speed-ups."""
    low, high = min(ratios), max(ratios)
    middle = statistics.median(ratio for ratio, _ in ratios)
    return (
        f"{middle:.1f} times as fast in the median of {len(ratios)} cases, from {low[0]:.2f} "
        f"({low[1]}) to {high[0]:.1f} ({high[1]})"
    )


def _auto(sections: Sections) -> Iterator[str]:
    rows = auto_rows(sections)
    if rows:
        far = [row for row in rows if row.is_far]
        clear = [row for row in far if not row.is_noise]
        worst = max(clear or rows, key=lambda row: row.ratio)
        yield (
            f"`auto` is more than {FAR - 1:.0%} behind the best algorithm in {len(far)} of "
            f"{len(rows)} cases, in {len(clear)} of them beyond the noise, in {_others(far)} "
            f"because it took another one; at worst {worst.ratio:.2f} times ({worst.section}, "
            f"{worst.case}, {worst.world_size} ranks, where `{worst.best}` is best)."
        )


def _processes(sections: Sections) -> Iterator[str]:
    ratios = []
    for (case, k), rows in _cases(sections, "processes"):
        own = next((rows[name] for name in ("checked", "coalesced") if name in rows), None)
        if own is not None and own.get("ratio_to_gloo"):
            ratios.append((own["ratio_to_gloo"], f"{case}, {k} ranks"))
    if ratios:
        yield f"One process per rank, against gloo: {_range(ratios)}."


def _ddp(sections: Sections) -> Iterator[str]:
    for row in sections.get("ddp", {}).get("rows", []):
        if row["candidate"] == "ringar" and row.get("ratio_to_gloo"):
            yield (
                f"DistributedDataParallel, {row['case']}, {row['world_size']} ranks: communication "
                f"costs {format_us(row['communication_ms'] * 1e3)} a step, gloo's "
                f"{row['ratio_to_gloo']:.1f} times as much."
            )


def _bucketing(sections: Sections) -> Iterator[str]:
    section = sections.get("bucketing")
    if not section:
        return
    shares = [
        (1 - row["exposed_ms"] / row["comm_ms"], f"{row['case']}, {row['world_size']} ranks")
        for row in section["rows"]
        if row["bucket_cap_mb"] is not None and row["comm_ms"] > 0
    ]
    if shares:
        low, high = min(shares), max(shares)
        yield (
            f"Buckets reduce while backward runs: {low[0]:.0%} ({low[1]}) to {high[0]:.0%} "
            f"({high[1]}) of the reductions' time was over before backward was."
        )


def _training(sections: Sections) -> Iterator[str]:
    ours = [
        (row["ratio_to_book"], f"{row['case']}, {row['world_size']} ranks")
        for row in sections.get("training", {}).get("rows", [])
        if row["candidate"] == "ringar"
    ]
    if ours:
        yield f"A training step of `pyringar train`, against the book's loop: {_range(ours)}."


def _gpu(sections: Sections) -> Iterator[str]:
    rows = sections.get("allreduce_cuda", {}).get("rows", [])
    ours = [
        (row["ratio_to_naive"], f"{row['case']}, {row['world_size']} ranks, {row['clock']}")
        for row in rows
        if row["algorithm"] in ("fused", "coalesced")
    ]
    if ours:
        yield f"Several ranks on one GPU, against the book's loop there: {_range(ours)}."
