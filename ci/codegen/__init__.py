"""Compiles the Triton kernels of a patched vLLM for GPUs that are not there.

``python -m codegen --help``, with ``ci`` and a vLLM source tree on PYTHONPATH.
`launches` lists what vLLM is made to launch, `__main__` turns each launch into a
compile-only one. Assembly and errors are written to files; `scripts/stack codegen`
reads and judges them.
"""
