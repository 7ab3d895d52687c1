"""The hourly placement of models on GPUs (SageServe 5): `choose.choose_placement` is the way in."""
