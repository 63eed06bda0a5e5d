"""Automatic rematerialisation: a minimum cut chooses the arrays that a function saves."""
