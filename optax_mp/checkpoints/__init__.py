"""Saved states, and their conversion to another form.

Orbax, `flax.serialization` and pickle save and restore states unchanged; nothing here
reads or writes files. `convert_opt_state` (`_convert.py`) converts the state of a run
to another form of its optimizer, such as other storage.
"""
