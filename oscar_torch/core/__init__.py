"""The format, its errors and settings, headers, page bookkeeping: plain Python, shared by both packages."""
