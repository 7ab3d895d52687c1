"""Which slot an instance takes, and which instance goes (SageServe 6.4): `choose.choose_slots` is the way in."""
