"""An SGLang plug-in: the host cache of routed experts without CUDA.

It is pinned memory, which only CUDA can give; on the CPU a plain allocation does. SGLang loads this through its own
entry point group (see the dist-info folder beside this file).
"""


def activate():
    from sglang.srt.mem_cache.pool_host import common

    def plain(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain
