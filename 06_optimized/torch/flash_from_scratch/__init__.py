"""The kernels of "FlashAttention from scratch" in PyTorch: attention(), the names of what it can run, a ring of GPUs,
and a cache of keys and values for writing."""

from ._attention import attention
from ._choice import kernels
from ._decode import PagedCache
from ._library import ENVIRONMENT as LIBRARY_VARIABLE
from ._ring import ring_attention, ring_rows

__all__ = ["LIBRARY_VARIABLE", "PagedCache", "attention", "kernels", "ring_attention", "ring_rows"]
