"""Fuzzing: targets read bytes that mean harm, and must refuse them in the declared way.

`python -m tests.fuzz.run TARGET --seconds N`; inputs that once failed are kept in `corpus/TARGET`.
"""
