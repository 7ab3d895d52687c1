"""The web console at `/ui`: the built files of `ops/console`, and sessions of the people who use it. It may import what
the API's other folders may.
"""
