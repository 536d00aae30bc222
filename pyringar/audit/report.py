"""The findings of an audit, as a table and as a document."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

_WIDTH = 80  # of a terminal


@dataclass(frozen=True)
class Finding:
    """One answer.

    ``verdict``: ``"yes"``, ``"no"``, the name of an order or a rounding, ``"-"`` if the question
    does not apply, or ``"failed"``. ``detail``: the same in words, for ``"no"`` with the first
    wrong element. ``case``: in numbers.
    """

    name: str
    verdict: str
    detail: str = ""
    case: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]

    def lines(self) -> list[str]:
        names = max(len(f.name) for f in self.findings)
        verdicts = max(len(f.verdict) for f in self.findings)
        is_narrow = verdicts <= _WIDTH // 4
        lines = [self.title]
        for one in self.findings:
            head = f"  {one.name:<{names}}  "
            if not is_narrow and one.detail:  # long names stand alone
                lines += _wrapped(head, f"{one.verdict}: {one.detail}")
            else:
                lines += _wrapped(head + f"{one.verdict:<{verdicts * is_narrow}}  ", one.detail)
        return lines


@dataclass(frozen=True)
class Report:
    """All that an audit has found; ``str(report)`` is a table."""

    target: str
    ranks: int
    sections: tuple[Section, ...]

    def __getitem__(self, name: str) -> Finding:
        for section in self.sections:
            for finding in section.findings:
                if finding.name == name:
                    return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.target}, {self.ranks} ranks"]
        for section in self.sections:
            lines += ["", *section.lines()]
        return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    lines = textwrap.wrap(head + text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return lines or [head.rstrip()]
