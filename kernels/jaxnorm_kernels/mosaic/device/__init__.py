"""What every kernel needs of the device: launches, layouts, barriers, clusters."""
