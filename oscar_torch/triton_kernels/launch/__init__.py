"""What every launch asks: whether the device can run it, and tensors as the kernels see them."""
