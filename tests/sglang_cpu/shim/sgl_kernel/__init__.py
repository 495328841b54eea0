"""A stand-in: SGLang's CPU kernels are in no package, and without AMX their every caller takes a plain torch branch."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_arguments, **_keywords):
        raise NotImplementedError(f"sgl_kernel.{name}: there are no CPU kernels in this environment")

    return absent
