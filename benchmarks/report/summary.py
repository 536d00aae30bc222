"""Say in sentences what was measured, and how far `auto` is from the best algorithm."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.bench import format_s
from benchmarks.candidates import candidate_of
from benchmarks.rows import Row, Sections, by_key, limits, share_of_limit

FAR = 1.10  # auto's time over the best algorithm's, above which a row is flagged
LARGE_BYTES = 16 * 2**20
BESIDE = "beside a busy process"  # how the names of such cases end
# What competes with auto. Where ranks share a process, naive is one line of torch: it counts.
NAMED = {
    "allreduce": ("fused", "direct", "ring", "sharded", "naive"),
    "processes": ("direct", "ring"),
}


@dataclass(frozen=True)
class AutoRow:
    """One case: what auto took, and the fastest algorithm that could have been named."""

    auto: Row
    best: Row

    @property
    def ratio(self) -> float:
        """Median of auto over that of the best one."""
        return self.auto.median_s / self.best.median_s

    @property
    def is_far(self) -> bool:
        """True where somebody should look at it."""
        return self.ratio > FAR

    @property
    def is_noise(self) -> bool:
        """True where the quartiles of both overlap, so that the difference says little."""
        return self.auto.q1_s <= self.best.q3_s

    @property
    def took_another(self) -> bool:
        """True where auto chose another one; with the same, a difference is the machine's."""
        return self.auto.takes not in (None, self.best.candidate)


def auto_rows(sections: Sections) -> list[AutoRow]:
    """Return every case in which both auto and algorithms by name were measured."""
    found = []
    for section, names in NAMED.items():
        for rows in _cases(sections, section):
            named = [rows[name] for name in names if name in rows]
            if "auto" in rows and any(row.candidate != "naive" for row in named):
                found.append(AutoRow(rows["auto"], min(named, key=lambda row: row.median_s)))
    return found


def _cases(sections: Sections, section: str) -> Iterator[dict[str, Row]]:
    """Yield a section's rows by candidate, case by case."""
    rows = sections[section].rows if section in sections else []
    for found in by_key(rows, lambda row: (row.case, row.world_size, row.clock)).values():
        yield {row.candidate: row for row in found}


def summary_lines(sections: Sections) -> list[str]:
    """Return a sentence or more for every section that was measured."""
    makers: tuple[Callable[[Sections], Iterable[str]], ...]
    makers = (_lists, _jax, _auto, _processes, _ddp, _bucketing, _training, gpu_lines)
    return [line for make in makers for line in make(sections)]


def headlines(sections: Sections) -> list[str]:
    """Return the first sentence each about ranks in lists, in processes, and under DDP."""
    makers = (_lists(sections), _processes(sections), _ddp(sections))
    return [line for lines in makers for line in itertools.islice(lines, 1)]


# -- sentences -------------------------------------------------------------------------------------


def _range(ratios: list[tuple[float, str]]) -> str:
    """Give the median and the ends of speed-ups."""
    low, high = min(ratios), max(ratios)
    middle = statistics.median(ratio for ratio, _ in ratios)
    digits = 1 if high[0] >= 2 else 2
    how_fast = f"{middle:.1f} times as fast" if abs(middle - 1) >= 0.05 else "equally fast"
    return (
        f"{how_fast} in the median of {len(ratios)} cases, from {low[0]:.2f} ({low[1]}) to "
        f"{high[0]:.{digits}f} ({high[1]})"
    )


def _against(peer: Row, own: Row) -> tuple[float, str]:
    return peer.median_s / own.median_s, f"{own.case}, {own.world_size} ranks"


def _percents(shares: list[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%} (median {statistics.median(shares):.0%})"


def _lists(sections: Sections) -> Iterator[str]:
    pairs: dict[str, list[tuple[float, str]]] = {"naive": [], "stack": []}
    shares = []
    num_large = 0
    are_limits = limits(sections["allreduce"].rows) if "allreduce" in sections else {}
    for rows in _cases(sections, "allreduce"):
        own = next((rows[n] for n in ("auto", "fused", "allreduce") if n in rows), None)
        if own is None:
            continue
        share = share_of_limit(own, are_limits)
        if (own.size_bytes or 0) >= LARGE_BYTES:
            num_large += 1
            shares += [share] if share else []
        for peer, ratios in pairs.items():
            if peer in rows:
                ratios.append(_against(rows[peer], own))
    for peer, words in (("naive", "the book's loop"), ("stack", "`torch.stack().sum()`")):
        if pairs[peer]:
            yield f"Ranks that are lists of one process, against {words}: {_range(pairs[peer])}."
    if shares:
        reached = f"{max(shares):.0%}" if len(shares) == 1 else _percents(shares)
        yield (
            f"From 16 MiB on a call reaches {reached} of the rate at which memory is read and "
            f"written once, which is known for {len(shares)} of {num_large} cases."
        )


def _jax(sections: Sections) -> Iterator[str]:
    ratios = [
        _against(rows["jax"], rows["auto"])
        for rows in _cases(sections, "lists")
        if {"jax", "auto"} <= set(rows)
    ]
    if ratios:
        yield f"Ranks that are lists of one process, against JAX's `psum`: {_range(ratios)}."


def _auto(sections: Sections) -> Iterator[str]:
    rows = auto_rows(sections)
    if rows:
        far = [row for row in rows if row.is_far]
        clear = [row for row in far if not row.is_noise]
        others = sum(row.took_another for row in far)
        worst = max(clear or rows, key=lambda row: row.ratio)
        about = f"{worst.auto.section}, {worst.auto.case}, {worst.auto.world_size} ranks"
        which = f", in {len(clear)} beyond the noise, in {others} because it took another one"
        yield (
            f"`auto` is more than {FAR - 1:.0%} behind the best algorithm in "
            f"{len(far) or 'none'} of {len(rows)} cases{which if far else ''}; at worst "
            f"{worst.ratio:.2f} times ({about}, where `{worst.best.candidate}` is best)."
        )


def _processes(sections: Sections) -> Iterator[str]:
    cases = list(_cases(sections, "processes"))
    peers = [
        candidate_of(name).label.partition(",")[0]
        for rows in cases
        for name in rows
        if name != "limit" and not candidate_of(name).is_ours
    ]
    against = f"the fastest peer of each case ({', '.join(dict.fromkeys(peers))})"
    for candidate, about in (
        ("auto", ""),
        ("bound", ", calls whose arguments were checked before"),
    ):
        own = [rows[candidate] for rows in cases if candidate in rows]
        for is_busy, beside in ((False, ""), (True, f", {BESIDE}")):
            ratios = [
                (row.speedup, f"{row.case.partition(',')[0]}, {row.world_size} ranks")
                for row in own
                if row.speedup and row.case.endswith(BESIDE) == is_busy
            ]
            if ratios:
                yield f"One process per rank{about}{beside}, against {against}: {_range(ratios)}."
                against = "the same peers"


def _ddp(sections: Sections) -> Iterator[str]:
    for rows in _cases(sections, "ddp"):
        own, gloo = (rows[name].parts_s["communication"] for name in ("ringar", "gloo"))
        if min(own, gloo) > 0:  # else in the noise: a ratio would say nothing
            row = rows["ringar"]
            yield (
                f"DistributedDataParallel, {row.case}, {row.world_size} ranks: communication "
                f"costs {format_s(own)} a step, gloo's {gloo / own:.1f} times as much."
            )


def _bucketing(sections: Sections) -> Iterator[str]:
    rows = sections["bucketing"].rows if "bucketing" in sections else []
    shares = [
        (
            max(0.0, 1 - row.parts_s["exposed"] / row.parts_s["reductions"]),
            f"{row.case}, {row.world_size}",
        )
        for row in rows
        if row.candidate.startswith("bucketed") and row.parts_s["reductions"] > 0
    ]
    if shares:
        low, high = min(shares), max(shares)
        yield (
            f"Buckets reduce while backward runs: {low[0]:.0%} ({low[1]} ranks) to {high[0]:.0%} "
            f"({high[1]} ranks) of the reductions' time was over before backward was."
        )
        hook_s = sections["bucketing"].facts.get("hook_s")
        if hook_s is not None:
            yield f"Counting a gradient in its hook costs {format_s(hook_s)}."


def _training(sections: Sections) -> Iterator[str]:
    ours = [_against(r["book"], r["ringar"]) for r in _cases(sections, "training") if "ringar" in r]
    if ours:
        yield f"A training step of `pyringar train`, against the book's loop: {_range(ours)}."


def gpu_lines(sections: Sections) -> list[str]:
    """Return sentences about ranks that share a GPU."""
    lines = []
    found = sections["allreduce_cuda"].rows if "allreduce_cuda" in sections else []
    rows = [row for row in found if row.clock == "device"]
    ours = [
        (row.speedup, f"{row.case}, {row.world_size} ranks")
        for row in rows
        if row.candidate == "auto" and row.speedup
    ]
    if ours:
        lines += [f"Several ranks on one GPU, against the book's loop there: {_range(ours)}."]
    are_limits = limits(rows)
    for name in ("fused", "ring"):
        large = [r for r in rows if r.candidate == name and (r.size_bytes or 0) >= LARGE_BYTES]
        if shares := [share for row in large if (share := share_of_limit(row, are_limits))]:
            lines += [
                f"From 16 MiB on `{name}` on one GPU reaches {_percents(shares)} of a copy's rate."
            ]
    epochs = [
        f"{rows['ringar'].case} {format_s(rows['ringar'].median_s)}"
        for rows in _cases(sections, "training_cuda")
        if "ringar" in rows and rows["ringar"].world_size == 1
    ]
    if epochs:
        lines += [f"An epoch of 60,000 images, one rank on one GPU: {'; '.join(epochs)}."]
    return lines
