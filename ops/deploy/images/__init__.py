"""Container images: their files, and the locks of what is installed in them."""
