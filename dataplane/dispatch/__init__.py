"""Which worker of a group runs each request. It imports `protocol`, `scheduling` and the engines' interface; no I/O."""
