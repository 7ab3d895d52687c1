"""Pure decisions: `choose_x(facts, now_s, settings) -> decision`, the same for the live service and the simulator."""
