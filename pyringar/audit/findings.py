"""The findings of an audit, printed as a table or converted to a dict."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

_WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    Attributes:
        name: The question.
        verdict: ``"yes"``, ``"no"``, the name of an order or a rounding, ``"-"`` if the question
            does not apply, or ``"failed"``.
        detail: An explanation; for ``"no"`` it names the first wrong element.
        case: The facts of ``detail`` as values, for JSON.
    """

    name: str
    verdict: str
    detail: str = ""
    case: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Findings under one title."""

    title: str
    findings: tuple[Finding, ...]

    def lines(self) -> list[str]:
        names = max(len(f.name) for f in self.findings)
        verdicts = max(len(f.verdict) for f in self.findings)
        is_narrow = verdicts <= _WIDTH // 4
        lines = [self.title]
        for finding in self.findings:
            head, verdict, detail = f"  {finding.name:<{names}}  ", finding.verdict, finding.detail
            if not is_narrow and detail:  # verdicts too long for a column
                lines += _wrapped(head, f"{verdict}: {detail}")
            else:
                lines += _wrapped(head + f"{verdict:<{verdicts * is_narrow}}  ", detail)
        return lines


@dataclass(frozen=True)
class AuditReport:
    """All findings of an audit; ``str(report)`` is a table."""

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
        if self._has_one_failure():
            shown = [Section(section.title, section.findings[:1]) for section in self.sections[:2]]
            end = ["", "The other calls failed likewise."]
        else:
            shown, end = list(self.sections), []
        for section in shown:
            lines += ["", *section.lines()]
        return "\n".join(lines + end)

    def _has_one_failure(self) -> bool:
        """Return True if all calls failed for the same reason."""
        findings = [finding for section in self.sections for finding in section.findings]
        details = [f.detail for f in findings if not f.detail.startswith("not asked")]
        reasons = {detail.partition(": ")[2] for detail in details} - {""}
        return {f.verdict for f in findings} <= {"failed", "-"} and len(reasons) == 1


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    lines = textwrap.wrap(head + text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return lines or [head.rstrip()]
