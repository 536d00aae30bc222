"""Are the staged and ring programs right in every interleaving, and are planted bugs refuted?

tests/cpp/model runs the templates of csrc/core on engines that record, and tries every order in
which what they do can reach memory. One build, many small runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_stress import BASE_FLAGS, JOBS, compile_all, require, run

pytestmark = pytest.mark.slow  # the build is

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/cpp/model"
PROGRAM = (ROOT / "csrc/core/staged_program.h").read_text()
STAGING_SLOTS = int(re.findall(r"kStagingSlots = (\d+);", PROGRAM)[0])
RUN_TIMEOUT_S = 60

# Exchanges leave `reduced` behind; at this distance a comparison of counters turns around.
TURNS = 2**31
WRAPS = -4  # counters pass 2^32 within three calls


@dataclass(frozen=True)
class Verdict:
    command: str
    is_proved: bool
    text: str

    @property
    def reason(self) -> str:
        lines = self.text.splitlines()[:-1]
        return "\n".join(lines) if lines[0].startswith("deadlock") else lines[-1]


Check = Callable[..., Verdict]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """``check(calls, ranks=2, slots=4)``: the verdict on a list of calls; see model.cpp."""
    require("g++")
    folder = tmp_path_factory.mktemp("model")
    objects = {source: folder / f"{source.stem}.o" for source in sorted(MODEL.glob("*.cpp"))}
    compiler = ["g++", *BASE_FLAGS, "-O2", "-Wall", "-Wextra", "-Werror"]
    compile_all([[*compiler, "-c", source, "-o", o] for source, o in objects.items()])
    program = folder / "model"
    compile_all([["g++", *objects.values(), "-o", program]])

    def run_model(calls: str, **options: object) -> Verdict:
        words = ["--calls", calls]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        done = run([program, *words], RUN_TIMEOUT_S)
        assert done.returncode in (0, 1), f"{words}: {done.returncode}\n{done.stdout}"
        return Verdict("model " + " ".join(words), done.returncode == 0, done.stdout)

    return run_model


def prove(check: Check, lists: Iterable[str], **options: object) -> None:
    layouts: list[dict[str, object]] = [{}]
    if options.get("ranks", 2) == 2:
        layouts.append({"swaps": 0})
    cases = list(itertools.product(lists, layouts))
    with ThreadPoolExecutor(JOBS) as pool:
        for verdict in pool.map(lambda case: check(case[0], **options, **case[1]), cases):
            assert verdict.is_proved, f"{verdict.command}\n{verdict.text}"


def refute(check: Check, calls: str, pattern: str, **options: object) -> Verdict:
    verdict = check(calls, **options)
    assert not verdict.is_proved, verdict.command
    assert re.search(pattern, verdict.reason), f"{verdict.command}\n{verdict.text}"
    first, *_, last = verdict.text.splitlines()
    assert re.match(r"(1\. rank \d: |deadlock: after |before any step)", first), verdict.text
    assert re.match(r"refuted: \d+ states, \d+ events, ", last), verdict.text
    return verdict


def pieces(*kinds: str, most: int = 3) -> list[str]:
    return [f"{kind}:{n}" for kind in kinds for n in range(1, most + 1)]


def mixes(calls: Iterable[str], length: int) -> Iterator[str]:
    return (",".join(mix) for mix in itertools.product(list(calls), repeat=length))


STAGED = pieces("direct", "exchange")
SINGLE = ["direct:1", "exchange:1"]


# -- Calls that share staging slots ----------------------------------------------------------------


REFUSED = pieces("refused", "refused-exchange")
RINGS = [f"{phases}:{n}" for phases in ("ring", "scatter", "gather") for n in (1, 2, 3, 6, 12)]
BETWEEN = [
    f"{a}:3,{b},{c}:3"
    for a, b, c in itertools.product(["direct", "exchange"], SINGLE, ["direct", "exchange"])
]
# A call that ranks make again, since their tensors lie otherwise than those of others.
AGAIN = ["refused:1", "refused:2", "refused-exchange:1", "refused-exchange:3"]
MIXED = ["exchange:2,direct:2", "exchange:1,direct:1,exchange:3,direct:3"]
# Lists of calls that share staging slots, and of rings.
PROVED = {
    "one call": STAGED,
    "two calls": list(mixes(STAGED, 2)),
    "three calls": list(mixes(STAGED, 3)),
    "three calls of one piece": list(mixes(SINGLE, 3)),
    "five calls of one piece": ["direct:1,exchange:1,exchange:1,direct:1,exchange:1"],
    "single pieces between others": BETWEEN,
    "refused calls": [*REFUSED, *(f"{a},{b}" for a, b in itertools.product(STAGED, REFUSED))],
    "calls after refused ones": [
        *(",".join(calls) for calls in itertools.product(SINGLE, AGAIN, STAGED)),
        "direct:3,refused:3,direct:3",
    ],
    "rings": RINGS,
    "ring phases after each other": list(mixes(pieces("ring", "scatter", "gather"), 2)),
}
CASES = [*itertools.product(PROVED, [2, 3]), ("two calls", 4), ("rings", 4), ("rings", 5)]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_calls_are_right_in_every_order(check: Check, name: str, ranks: int) -> None:
    prove(check, PROVED[name], ranks=ranks, base=WRAPS)


@pytest.mark.thorough
def test_four_staged_calls(check: Check) -> None:
    prove(check, mixes(pieces("direct", "exchange", most=4), 3), base=WRAPS)
    prove(check, mixes(STAGED, 4), base=WRAPS)


@pytest.mark.parametrize("base", range(-9, 1))
def test_counters_wrap_anywhere(check: Check, base: int) -> None:
    prove(check, ["direct:3,exchange:3,direct:2", "exchange:4,direct:4"], base=base)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("behind", [TURNS - 1, TURNS, TURNS + 1, 2**32 - 1])
def test_reduced_far_behind(check: Check, ranks: int, behind: int) -> None:
    for base in (0, WRAPS):
        lists = ["direct:1", "direct:3", *MIXED]
        prove(check, lists, ranks=ranks, base=base, reduced_behind=behind)


# -- How many slots are enough ---------------------------------------------------------------------

LONG = pieces("direct", "exchange", most=4)
# The smallest number of slots with which each is proved.
SMALLEST = {
    "direct:4": 3,
    "direct:4,direct:4": 3,
    "exchange:4": 4,
    "exchange:4,exchange:4": 4,
    "direct:4,exchange:4": 4,
    "exchange:4,direct:4": 4,
    "exchange:2,direct:2": 4,
    "direct:1,direct:1,direct:1": 2,
    "exchange:1,exchange:1,exchange:1": 2,
    "direct:1,direct:1,exchange:1,direct:1": 2,
}
# A slot is written again while a rank still reads what was there. With one slot, a rank may even
# have overwritten its own.
TOO_FEW = r"expected message (\d+): ranks? [\d+]+, found message (?!\1\b)\d+: rank"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("calls", SMALLEST)
def test_smallest_number_of_staging_slots(check: Check, calls: str, ranks: int) -> None:
    for slots in range(1, SMALLEST[calls]):
        refute(check, calls, TOO_FEW, ranks=ranks, slots=slots, swaps=0)
    for slots in range(SMALLEST[calls], STAGING_SLOTS + 1):
        prove(check, [calls], ranks=ranks, slots=slots)


def test_staging_slots_are_minimal(check: Check) -> None:
    def is_proved(slots: int) -> bool:
        return all(check(mix, slots=slots).is_proved for mix in mixes(LONG, 2))

    assert next(slots for slots in range(1, 9) if is_proved(slots)) == STAGING_SLOTS
    assert max(SMALLEST.values()) == STAGING_SLOTS


def test_staging_slots_are_a_power_of_two(check: Check) -> None:
    """Or n % slots would not go on evenly when n wraps."""
    prove(check, ["direct:4"], slots=3)
    refute(check, "direct:4", "which it wrote there itself", slots=3, base=-2, swaps=0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_smallest_number_of_ring_slots(check: Check, ranks: int) -> None:
    """With fewer than 2k, all ranks wait for a slot and none for a message."""
    stuck = r"nobody can go on\nrank 0: waits for taken of link 0 >= \d+, and it is \d+ for ever"
    for slots in range(1, 2 * ranks):
        refute(check, "ring:12", stuck, ranks=ranks, ring_slots=slots)
    prove(check, ["ring:12", "scatter:2", "gather:2"], ranks=ranks, ring_slots=2 * ranks)


# -- Planted bugs ----------------------------------------------------------------------------------

# What is found in place of a message: nothing yet, or the ranks' parts before they are added up.
UNWRITTEN = r"message (\d), [^:]+: expected message \1: ranks? [\d+]+, found nothing$"
UNREDUCED = r"expected message 1: ranks 0\+1[+2]*, found message 1: rank \d$"
UNANNOUNCED = r"reads calls.1. of rank 1, call 1: expected call 1, found nothing$"
SAME_NUMBER = r"expected (message \d: ranks? [\d+]+), found \1(, which it wrote there itself)?$"
PLANTED = [
    ("waits-without-acquire", "direct:2", UNANNOUNCED),
    ("waits-without-acquire", "exchange:2", UNANNOUNCED),
    ("waits-without-acquire", "ring:1", UNWRITTEN),
    ("compares-without-wrap", "direct:3", r"announced of rank 0 >= 4294967295, and it is 0 for"),
    ("compares-without-wrap", "exchange:3", UNWRITTEN),
    ("compares-without-wrap", "ring:2", UNWRITTEN),
    ("base-stays", "direct:1,direct:1", SAME_NUMBER),
    ("base-stays", "exchange:1,exchange:1", SAME_NUMBER),
    ("base-stays", "ring:1,ring:1", SAME_NUMBER),
    ("announces-without-release", "direct:1", UNANNOUNCED),
    ("announces-without-release", "exchange:1", UNANNOUNCED),
    ("reduced-without-release", "direct:1", UNREDUCED),
    ("announces-first", "direct:1", UNWRITTEN),
    ("announces-first", "exchange:1", UNWRITTEN),
    ("announced-not-awaited", "direct:1", UNANNOUNCED),
    ("announced-not-awaited", "exchange:1", UNANNOUNCED),
    ("reduced-not-awaited", "direct:1", UNREDUCED),
    ("one-rank-not-awaited", "direct:1", UNREDUCED),
    ("two-ahead", "exchange:5", TOO_FEW),
    ("adds-one-twice", "direct:1", r"sum of ranks 0\+1[+2]*, found the sum of ranks 0\+0[+2]*$"),
    ("one-call-record", "exchange:1,exchange:1", r"calls.0. of .*: expected call 1, found call 2$"),
    ("publishes-without-release", "ring:1", UNWRITTEN),
    ("frees-without-release", "ring:3", TOO_FEW),
    ("publishes-first", "ring:1", UNWRITTEN),
    ("frees-before-reading", "ring:3", TOO_FEW),
    ("slot-not-awaited", "ring:3", TOO_FEW),
    ("message-not-awaited", "ring:1", UNWRITTEN),
    ("message-not-awaited", "gather:1", UNWRITTEN),
]
PLANTED_IDS = [f"{bug}-{calls}" for bug, calls, _ in PLANTED]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("bug", "calls", "pattern"), PLANTED, ids=PLANTED_IDS)
def test_planted_bug_is_refuted(
    check: Check, bug: str, calls: str, pattern: str, ranks: int
) -> None:
    refute(check, calls, pattern, ranks=ranks, swaps=0, base=-2, bug=bug)
    prove(check, [calls], ranks=ranks, base=-2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_direct_call_raises_reduced(check: Check, ranks: int) -> None:
    options = {"ranks": ranks, "bug": "reduced-left-behind"}
    prove(check, ["direct:1"], reduced_behind=TURNS - 1, **options)
    refute(check, "direct:1", UNREDUCED, reduced_behind=TURNS, **options)
    # The exchange is what goes too far.
    options["reduced_behind"] = TURNS - 1
    refute(check, "exchange:1,direct:1", "found message 2: rank .$", **options)


# -- The search itself -----------------------------------------------------------------------------


# Lists short enough for a search that tries every event in every state.
SHORT = [
    ("direct:1", {}),
    ("direct:1", {"reduced_behind": TURNS}),
    ("exchange:1", {"base": -1}),
    ("scatter:1,gather:1", {"base": -1}),
    ("scatter:1", {"ranks": 3}),
    ("gather:2", {}),
    ("direct:1,direct:1", {"slots": 1}),
    ("exchange:4", {"slots": 3}),
    ("direct:3", {"slots": 2}),
    ("ring:2", {"ring_slots": 2}),
]


@pytest.mark.parametrize(("calls", "options"), SHORT)
def test_reduction_agrees(check: Check, calls: str, options: dict[str, int]) -> None:
    every, reduced = (check(calls, every_order=n, swaps=0, **options) for n in (1, 0))
    assert every.is_proved == reduced.is_proved, [every, reduced]
