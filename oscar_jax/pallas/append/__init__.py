"""One new token per sequence: stores its rows and quantizes the page that leaves the window."""
