"""Triton kernels: complete on their own, they import only torch and triton."""
