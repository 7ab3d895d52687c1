"""How many instances each endpoint should have now (SageServe 4, 6.4). Entry point: `choose.choose_scaling`."""
