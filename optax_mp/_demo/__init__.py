"""The parts of `python -m optax_mp`, which `optax_mp/__main__.py` puts together.

- `settings`, `text`, `model`: the task that all runs share.
- `runs`: the ways to train that are compared.
- `train`: the training loop, which returns a `Result`.
- `progress`, `report`: what the terminal shows, during the runs and after them.
- `picture`, `chart`: the HTML page.
"""
