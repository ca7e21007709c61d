"""The step loop: schedule, execute, apply."""
