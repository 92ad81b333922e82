"""The kernels of "FlashAttention from scratch" in PyTorch: attention(), the names of what it can run, and a
cache of keys and values for writing."""

from ._attention import attention
from ._choice import kernels
from ._decode import PagedCache
from ._library import ENVIRONMENT as LIBRARY_VARIABLE

__all__ = ["LIBRARY_VARIABLE", "PagedCache", "attention", "kernels"]
