"""Grammars: compiled beside the step loop, matched token by token in it. No torch."""
