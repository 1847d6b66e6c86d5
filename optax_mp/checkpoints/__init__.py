"""Checkpoints: checked before a restore, and converted into another form."""
