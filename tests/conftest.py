"""Eight fake host devices on CPU, chosen before JAX is imported anywhere."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # `make gpu-check` names another
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
