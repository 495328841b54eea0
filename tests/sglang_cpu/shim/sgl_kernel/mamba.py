"""See the package."""

from sgl_kernel import __getattr__  # noqa: F401
