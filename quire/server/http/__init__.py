"""What every HTTP request passes: connection, limits, authentication, errors, event streams."""
