"""What the GPU kernels compile to, without a GPU: registers, spills, memory and tensor-core instructions.

`launches` says which calls of Triton kernels are made, `compiled` compiles what they would launch, `cubins` reads the
CUDA C++ kernels out of their library, `table` judges and keeps the results.
"""
