"""What the modules of Flax and equinox share: conversions, attention."""
