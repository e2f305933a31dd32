"""The engine's GPU half: Triton kernels, the forward pass, the runner with its CUDA graphs.

The runner is imported only when the device is a GPU (or, in tests, with Triton's interpreter on
the CPU). What decides without torch is not: `buckets` and `kernels.cuts`.
"""
