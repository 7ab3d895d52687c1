"""`python -m ops.reference`: write the generated pages of the documentation anew."""

from ops.reference.pages import DOCS, write_pages

for path in write_pages(DOCS):
    print(f"written: {path}")
