"""Verifiers that may hang, crash or eat memory: each runs in a process of its own that can be killed.

`worker` is the process, `pool` its owner; `dapo`, `prime_math` and `math_verify` are the rules that run in it. Nothing
in here imports JAX: a worker starts in a fraction of a second.
"""
