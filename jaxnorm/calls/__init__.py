"""How a call is described, how its arrays are reshaped, and which implementation runs it."""
