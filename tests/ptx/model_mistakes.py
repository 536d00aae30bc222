"""Mistakes in the model itself: what its litmus tests must notice, one by one."""

from __future__ import annotations

from pathlib import Path

from build_ptx import CXX_FLAGS, FOLDER, INCLUDES, compile_all

# A file, a line of it, and what to write instead.
MISTAKES = {
    "every-scope-is-the-system": (
        "memory.cpp",
        "if (scope == Scope::kSystem) return true;",
        "return true;",
    ),
    "one-scope-is-enough": (
        "memory.cpp",
        "return includes(access.scope, thread, other) &&",
        "return",
    ),
    "a-barrier-hands-nothing-on": ("memory.cpp", "    self.known.join(*thread.own);\n", ""),
    "a-barrier-hands-nothing-of-thread-0-on": (
        "memory.cpp",
        "    self.known.join(*thread.own);",
        "    if (i != 0) self.known.join(*thread.own);",
    ),
    "a-barrier-is-of-the-next-phase-too": (
        "memory.cpp",
        "e.block == self.block && e.phase < block.phase",
        "e.block == self.block && e.phase <= block.phase",
    ),
    "a-fence-acquires-nothing": (
        "memory.cpp",
        "  for (const auto& [at, release] : self.unfenced) "
        "acquire(thread, release, access.scope);\n",
        "",
    ),
    "a-fence-releases-nothing": (
        "memory.cpp",
        "  if (self.fenced.known != nullptr) message.releases.push_back(self.fenced);\n",
        "",
    ),
    "a-fence-has-every-scope": (
        "memory.cpp",
        "if (!includes(release.scope, release.thread, thread)) continue;",
        "",
    ),
    "a-release-is-of-what-comes-behind-it": (
        "memory.cpp",
        "  self.event = 0;\n  return {std::make_shared",
        "  return {std::make_shared",
    ),
    "a-release-hands-no-values-on": ("memory.cpp", "  seen.join(other.seen);\n", ""),
    "a-release-ends-with-its-store": (
        "memory.cpp",
        "if (release.thread == thread && release.is_of_word) message.releases.push_back(release);",
        "",
    ),
    "a-launch-hands-nothing-on": (
        "memory.cpp",
        "  into.phases.raise(block, self.phase + 1);\n",
        "",
    ),
    "an-update-hands-nothing-on": (
        "memory.cpp",
        "  if (is_update) message.releases = word.messages.back().releases;\n",
        "",
    ),
    "every-load-acquires": ("memory.cpp", "      if (is_acquire) {", "      if (true) {"),
    "no-acquire-of-what-was-read-before": (
        "memory.cpp",
        "    if (is_acquire && of == at) acquire(thread, release, access.scope);\n",
        "",
    ),
    "every-load-sees-the-newest": (
        "memory.cpp",
        "self.num_stale < kMostStale ? chooser_.choose(newest - oldest + 1) : 0",
        "0",
    ),
    "a-word-is-read-backwards": (
        "memory.cpp",
        "own(self).seen.raise(word.number, static_cast<std::uint32_t>(number));",
        "",
    ),
    "a-thread-misses-what-it-wrote": (
        "memory.cpp",
        "  own(self).seen.raise(word.number, static_cast<std::uint32_t>(word.messages.size()));\n",
        "",
    ),
    "a-weak-store-is-missed": (
        "memory.cpp",
        "    own(threads_[thread]).seen.raise(word.number, "
        "static_cast<std::uint32_t>(word.messages.size()));\n",
        "",
    ),
    "reads-do-not-race-with-later-writes": (
        "memory.cpp",
        '      check(thread, to + i, "writes", access, reader, "reads");\n',
        "",
    ),
    "writes-do-not-race": (
        "memory.cpp",
        '    check(thread, to + i, "writes", access, cell.write, "writes");\n',
        "",
    ),
    "two-strong-accesses-in-a-turn": (
        "machine.cpp",
        "if (!std::exchange(may_be_strong, false)) return;",
        "",
    ),
}


def build_with(name: str, program: Path, folder: Path) -> Path:
    """Build the program anew with a mistake, from the objects beside it."""
    file, line, instead = MISTAKES[name]
    text = (FOLDER / file).read_text()
    assert line in text, f"{file} no longer says {line!r}"
    source = folder / file
    source.write_text(text.replace(line, instead, 1))
    made = folder / f"{source.stem}.o"
    compile_all([["g++", *CXX_FLAGS, "-w", *INCLUDES, "-c", source, "-o", made]])
    others = [path for path in program.parent.glob("*.o") if path.name != made.name]
    compile_all([["g++", *others, made, "-o", folder / "ptx"]])
    return folder / "ptx"
