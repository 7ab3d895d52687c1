"""Assignment of instances to slots, and which instance goes (SageServe 6.4). Entry point: `choose.choose_slots`."""
