"""`python -m ops.reference`: write the generated pages, and the API's description for the console, anew."""

from ops.reference.pages import OPS, write_pages

for path in write_pages(OPS):
    print(f"written: {path}")
