"""`python -m evenround`: the same as the console script `evenround`."""

import sys

from evenround.cli import main

if __name__ == "__main__":
    sys.exit(main())
