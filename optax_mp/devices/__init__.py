"""State over many devices."""
