"""`python -m ops.deploy.boards`: write the boards anew."""

from ops.deploy.boards.all import write_boards

for path in write_boards():
    print("written:", path)
