"""`python -m quire` is the `quire` command."""

import sys

from quire.cli import main

sys.exit(main())
