"""The Triton kernels. Importing this imports Triton; nothing else of the package does."""
