"""The kernels of "FlashAttention from scratch" in PyTorch: attention(), and the names of what it can run."""

from ._attention import attention
from ._choice import kernels
from ._library import ENVIRONMENT as LIBRARY_VARIABLE

__all__ = ["LIBRARY_VARIABLE", "attention", "kernels"]
