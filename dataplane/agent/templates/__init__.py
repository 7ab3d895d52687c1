"""Chat templates: a conversation becomes a prompt. Jinja runs only in the processes of `process.py`."""
