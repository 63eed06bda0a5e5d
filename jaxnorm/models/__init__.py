"""Parts that the modules of Flax and equinox share: conversions and attention."""
