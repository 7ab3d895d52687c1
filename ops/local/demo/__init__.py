"""`tidepool demo`: the main job end to end, and what it shows of it."""
