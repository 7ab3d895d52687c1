"""How many instances each endpoint should have now (SageServe 4, 6.4): `choose.choose_scaling` is the way in.

Which slot takes them is the decision of `policies.assignment`.
"""
