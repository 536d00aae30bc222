"""Run the ``pyringar`` command for ``python -m pyringar``."""

import sys

from pyringar.cli import main

if __name__ == "__main__":
    sys.exit(main())
