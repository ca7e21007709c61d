"""What runs next, and in which blocks. Python and numpy only; time is an argument."""
