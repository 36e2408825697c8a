"""What the kernels are written in: registers, fragments of matrix products, launch plans."""
