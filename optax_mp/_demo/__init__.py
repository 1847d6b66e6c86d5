"""What `python -m optax_mp` is made of: the model, the runs, what is shown of them."""
