"""Kernels of the GPU engine in Triton and CUDA C, and how work is cut into their programs."""
