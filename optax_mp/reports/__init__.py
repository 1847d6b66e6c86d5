"""What a model takes and would lose, as tables."""
