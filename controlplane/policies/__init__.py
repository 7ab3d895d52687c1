"""Pure decisions: `choose_x(facts, now_s, settings) -> decision`. The live service and the simulator call the same functions."""
