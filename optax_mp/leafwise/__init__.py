"""Take a step leaf by leaf."""
