"""Theory against reality: predictions held against measurements."""
