"""`sat-jax doctor`: what is wrong with a run, before its first step costs anything.

A check is a pure function of what it looks at and gives findings; `examine` looks, at the machine, the data and the
live fleet.
"""
