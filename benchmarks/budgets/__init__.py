"""What the Triton kernels compile to, without a GPU: registers, spills, memory and tensor-core instructions.

`launches` says which calls are made, `compiled` compiles what they would launch, `table` judges and keeps the results.
"""
