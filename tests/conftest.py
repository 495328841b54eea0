"""Eight fake host devices on CPU, chosen before JAX is imported anywhere; and no test fails for being slow."""

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # `make gpu-check` names another
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

# An example that compiles takes as long as it takes: pytest's own time limit is for what hangs.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
