"""`quire bench`: one file per benchmark, each with `add_arguments(parser)` and `run(arguments)`."""
