"""The step loop: schedule, execute, sample, apply."""
