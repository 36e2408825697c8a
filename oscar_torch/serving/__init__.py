"""Many sequences over shared pages, and snapshots of them."""
