"""`python -m quire.entrypoints.openai.api_server --model MODEL` is `quire serve MODEL`."""

from __future__ import annotations

import sys

from quire.cli import main
from quire.config.cli import command_words

if __name__ == "__main__":
    sys.exit(main(["serve", *command_words()]))
