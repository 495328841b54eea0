"""`sat-jax prepare`: public data sets, in the forms that they come in, -> files that a run reads."""
