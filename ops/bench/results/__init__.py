"""Rows of the page of results that commands make: run, kept, written into the page, and run again to check them."""
