"""``python -m pyringar`` is the ``pyringar`` command."""

import sys

from pyringar.cli import main

if __name__ == "__main__":
    sys.exit(main())
